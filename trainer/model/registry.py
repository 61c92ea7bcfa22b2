"""A model's parts by slot and name, each with its builder, facts, options and check. No JAX.

`register` adds a part from a user's module; an annex lists its parts in its annex.toml, such as
`NAME = ".parts:CONSTANT"` in the table [parts.mixer], and its families in the table [families].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tasks.annexes import Registry
from tasks.terminal.flag_fields import Rejected, Rule, above, at_least, field, one_of
from trainer.model import windows
from trainer.model.part_facts import (
    DECODER,
    ENCODER,
    ENCODER_DECODER,
    T5X,
    TRANSFORMERS,
    CrossFacts,
    FamilyFacts,
    FeedForwardFacts,
    MixerFacts,
    PlacementFacts,
    PositionFacts,
    StackPartFacts,
    WindowFacts,
)
from trainer.model.slot import Part, Slot, constant, of_options, reject_changed, require_of
from trainer.model.windows import Sliding

__all__ = ["register"]

ACTIVATION_NAMES = ("gelu", "gelu_erf", "linear", "relu", "silu", "squared_relu")
# Functions that map logits to attention weights.
WEIGHT_NAMES = ("softmax", "elu", "squared_relu", "norm_elu", "norm_squared_relu")
# Parts that can start at zero.
ZERO_NAMES = ("logits", "query", "residual")
PER_LAYER = "relative_per_layer"
FULL_PATTERN = "full"
# Channels of all heads.
JOINED = "joined"


GAINS = ("vector", "offset", "scalar", "none")


@dataclass(frozen=True)
class NormOptions:
    """Options of a norm."""

    epsilon: float = field(1e-6, "added to the mean square or the variance", rule=above(0))
    gain: str = field(
        "vector",
        "learned scale: one per channel (vector); the same, stored minus 1 so that weight decay "
        "pulls it to 1, as in Gemma (offset); one for all channels (scalar); or none",
        choices=GAINS,
    )


@dataclass(frozen=True)
class LayerNormOptions(NormOptions):
    """Options of a norm that subtracts the mean."""

    bias: bool = field(True, "add a learned bias to each channel")


@dataclass(frozen=True)
class Sinusoidal:
    """Options of sines and cosines added to the embeddings."""

    base: float = field(
        10_000.0, "the longest wave spans 2 pi times this many positions", rule=above(1)
    )


@dataclass(frozen=True)
class Relative:
    """Options of T5's distance biases."""

    num_buckets: int = field(
        32,
        "number of distance buckets in each table; a multiple of 4",
        rule=Rule("a multiple of 4, above 0", lambda value: value > 0 and value % 4 == 0),
    )
    max_distance: int = field(128, "distance (tokens) from which on all distances share a bucket")

    def __post_init__(self) -> None:
        if self.max_distance <= self.num_buckets // 2:
            raise Rejected("max_distance", self.max_distance, "above num_buckets / 2")


SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rotary:
    """Options of rotated queries and keys."""

    base: float = field(
        10_000.0, "the slowest pair turns once in 2 pi times this many positions", rule=above(1)
    )
    fraction: float | None = field(
        None,
        "share of a head's channels that is rotated; None means all, but a quarter in BERT",
        rule=Rule("in (0, 1]", lambda value: 0 < value <= 1),
    )
    cross: bool = field(False, "also rotate cross-attention's queries and keys")
    scaling: str = field(
        "none",
        "slow rotation down for rows longer than in pretraining: all pairs by `factor` (linear), "
        "or only slow pairs, as in Llama 3.1 (llama3) and YaRN (yarn)",
        choices=SCALINGS,
    )
    factor: float = field(8.0, "factor by which scaling slows pairs down", rule=at_least(1))
    low_frequency: float = field(
        1.0, "llama3: turns in original_positions below which a pair is slowed down fully"
    )
    high_frequency: float = field(
        4.0, "llama3: turns in original_positions above which a pair is left alone"
    )
    original_positions: int = field(
        8192, "llama3, yarn: row length in pretraining (tokens)", rule=above(0)
    )
    beta_fast: float = field(
        32.0, "yarn: turns in original_positions from which on a pair is left alone", rule=above(0)
    )
    beta_slow: float = field(
        1.0, "yarn: turns in original_positions up to which a pair is slowed down", rule=above(0)
    )
    truncate: bool = field(True, "yarn: round the pairs with these numbers of turns outwards")
    attention_factor: float | None = field(
        None,
        "yarn: factor of rotated queries and of rotated keys; None: 0.1 * ln(factor) + 1",
        rule=above(0),
    )

    def __post_init__(self) -> None:
        if not self.low_frequency < self.high_frequency:
            raise Rejected("high_frequency", self.high_frequency, "above low_frequency")
        if not self.beta_slow < self.beta_fast:
            raise Rejected("beta_fast", self.beta_fast, "above beta_slow")
        if self.scaling == "none":
            reject_changed(self, "without scaling", "factor")
        if self.scaling not in ("llama3", "yarn"):
            reject_changed(self, "without scaling=llama3 or yarn", "original_positions")
        if self.scaling != "llama3":
            reject_changed(self, "without scaling=llama3", "low_frequency", "high_frequency")
        if self.scaling != "yarn":
            own = ("beta_fast", "beta_slow", "truncate", "attention_factor")
            reject_changed(self, "without scaling=yarn", *own)


def _check_rotary(config: Any, options: Rotary) -> None:
    channels = config.rotated_channels
    rule = f"such that rotary positions rotate an even number of channels, not {channels:g}"
    require_of(config, channels > 0 and channels % 2 == 0, "head_dim", rule)
    rule = "without cross=true in a model without cross-attention"
    fits = not options.cross or config.has_both_stacks
    require_of(config, fits, "position", rule)


ATTENTION = MixerFacts(
    cores=True,
    queries=True,
    groups=True,
    sparse=True,
    selects=True,
    caches=True,
    exports=(TRANSFORMERS, T5X),
)


@dataclass(frozen=True)
class Normal:
    """Options of initial values drawn from one normal distribution."""

    deviation: float = field(0.02, "standard deviation, before truncation at two", rule=above(0))
    scale_residual: bool = field(
        False,
        "divide the deviation of kernels that end a residual branch by the square root of the "
        "number of branches, as in GPT-2 and Megatron-LM",
    )


MUP_RULES = ("relative", "absolute")
READOUTS = ("inverse", "relative", "standard", "zero")


@dataclass(frozen=True)
class MaximalUpdate:
    """Options of muP."""

    base_width: int = field(
        128,
        "emb_dim of the model whose learning rate is used: a wider model's hidden kernels learn "
        "at base_width / emb_dim of that rate",
        rule=above(0),
    )
    rule: str = field(
        "relative",
        "learning rates of kernels: the run's rate times base_width / emb_dim (relative), or "
        "times 1 / fan-in (absolute)",
        choices=MUP_RULES,
    )
    readout: str = field(
        "inverse",
        "standard deviation of the initial logits kernel: 1 / emb_dim (inverse), the standard "
        "one at base_width, falling as 1 / emb_dim (relative), emb_dim ** -0.5 (standard), "
        "or zero",
        choices=READOUTS,
    )

    def __post_init__(self) -> None:
        if self.rule == "absolute" and self.readout != "relative":
            reject_changed(self, "with rule=absolute and this readout", "base_width")


def _check_mup(config: Any, options: MaximalUpdate) -> None:
    zero = options.readout == "zero"
    fits = not (zero and config.value("tied_logits"))
    require_of(config, fits, "parametrisation", "one with a different readout: logits are tied")


def _check_no_feed_forward(config: Any, options: Any) -> None:
    rule = "'none' with feed_forward 'none'"
    require_of(config, config.parallel_blocks == "none", "parallel_blocks", rule)


_NORMS = "trainer.model.norms:"
_ARRANGEMENTS = "trainer.model.arrangements:"
_POSITIONS = "trainer.model.positions:"
_PARAMETRISATIONS = "trainer.model.parametrisation:"
_FEED_FORWARD = "trainer.model.feedforward:"
# The slots that fields of `ModelConfig` fill with named parts.
SLOTS = {
    slot.field: slot
    for slot in (
        # Builder(config, options) -> `feedforward.FeedForward`.
        Slot(
            "feed_forward",
            {
                "mlp": Part(
                    _FEED_FORWARD + "mlp", FeedForwardFacts(("mlp_activations", "mlp_bias"))
                ),
                "none": Part(
                    constant(_FEED_FORWARD + "NO_FEED_FORWARD"), check=_check_no_feed_forward
                ),
            },
            FeedForwardFacts,
        ),
        # Builder(config, options, stack) -> the `spec.StackSpec` with the views of its layers.
        Slot(
            "attention_window",
            {
                "none": Part(lambda config, options, stack: stack, WindowFacts(fuses=True)),
                "sliding": Part(windows.slide, WindowFacts(fuses=True), Sliding, windows.check),
            },
            WindowFacts,
        ),
        # A pattern's options are a `sparsity.Pattern`.
        Slot("attention_pattern", {FULL_PATTERN: Part(lambda config, options: None)}),
        # Builder(config, options) -> `mixers.Mixer`.
        Slot(
            "mixer",
            {"attention": Part("trainer.model.attention:self_attention", ATTENTION)},
            MixerFacts,
        ),
        # Builder(config, options) -> `norms.Norm`.
        Slot(
            "norm",
            {
                "layer_norm": Part(of_options(_NORMS + "LayerNorm"), options=LayerNormOptions),
                "rms_norm": Part(of_options(_NORMS + "RMSNorm"), options=NormOptions),
            },
        ),
        # Builder(config, options) -> `parametrisation.StandardParametrisation`.
        Slot(
            "parametrisation",
            {
                "mup": Part(_PARAMETRISATIONS + "mup", options=MaximalUpdate, check=_check_mup),
                "normal": Part(_PARAMETRISATIONS + "normal", options=Normal),
                "standard": Part(constant(_PARAMETRISATIONS + "STANDARD")),
            },
        ),
        # Builder(config, options, bidirectional) -> `positions.Position`.
        Slot(
            "position",
            {
                "absolute": Part(_POSITIONS + "absolute", PositionFacts(counts_positions=True)),
                "alibi": Part(_POSITIONS + "alibi", PositionFacts(fuses=False, any_width=False)),
                "none": Part(constant(_POSITIONS + "NO_POSITION")),
                "relative": Part(_POSITIONS + "relative", options=Relative),
                PER_LAYER: Part(_POSITIONS + "relative", options=Relative),
                "rotary": Part(
                    _POSITIONS + "rotary",
                    PositionFacts(rotates=True, any_width=False),
                    Rotary,
                    _check_rotary,
                ),
                "sinusoidal": Part(
                    of_options(_POSITIONS + "SinusoidalPosition"), options=Sinusoidal
                ),
            },
            PositionFacts,
        ),
        # Builder(config, options) -> `norms.Placements`.
        Slot(
            "norm_placement",
            {
                "branch": Part(constant(_NORMS + "ON_BRANCHES")),
                "post": Part(constant(_NORMS + "AFTER_SUMS"), PlacementFacts(ends_normalised=True)),
                "pre": Part(constant(_NORMS + "BEFORE_SUBLAYERS"), PlacementFacts(parallel=True)),
                "pre_but_first": Part(
                    constant(_NORMS + "BEFORE_ALL_BUT_FIRST"), PlacementFacts(alike=False)
                ),
                "sandwich": Part(constant(_NORMS + "SANDWICH")),
            },
            PlacementFacts,
        ),
        # Builder(config, options) -> `arrangements.Arrangement`.
        Slot(
            "parallel_blocks",
            {
                "none": Part(constant(_ARRANGEMENTS + "sequential")),
                "one_norm": Part(constant(_ARRANGEMENTS + "parallel_with_one_norm")),
                "two_norms": Part(constant(_ARRANGEMENTS + "parallel")),
            },
        ),
        # Builder(config, options) -> `stack_parts.CrossAttention`.
        Slot(
            "cross_attention",
            {"attention": Part("trainer.model.attention:cross_attention")},
            CrossFacts,
        ),
    )
}
MIXERS, POSITIONS = SLOTS["mixer"], SLOTS["position"]
# Parts of whole stacks, of which a model may have several: builder(config, options) ->
# `stack_parts.StackPart`. The first stands for none.
STACK_PARTS = Slot("stack_parts", {"none": Part(lambda config, options: None)}, StackPartFacts)


def require_selecting_mixer(config: Any, field: str) -> None:
    """Rejects a mixer whose softmax cannot cover only some positions, or several rows."""
    if not config.mixer_facts.selects:
        fitting = [name for name, part in MIXERS.items() if part.facts.selects]
        raise Rejected("mixer", config.value("mixer"), f"{one_of(fitting)} with {field}")


def register(slot: str, name: str, part: Part) -> None:
    """Makes `name` a value of `ModelConfig`'s field `slot`.

    Raises:
      ValueError: if no field of this name takes parts, or the part's name is taken or unusable.
    """
    slots = {**SLOTS, STACK_PARTS.field: STACK_PARTS}
    if slot not in slots:
        raise ValueError(f"there is no slot {slot!r}; the slots are {', '.join(slots)}")
    slots[slot].register(name, part)


_T5_1_1 = FamilyFacts(ENCODER_DECODER, tied_logits=False)
# Llama's paper gives no initial values; these are GPT-2's, as in Megatron-LM.
_LLAMA = FamilyFacts(
    DECODER,
    position="rotary",
    mlp_activations=("silu", "linear"),
    tied_logits=False,
    parametrisation="normal:scale_residual=true",
)
_BERT = FamilyFacts(
    ENCODER,
    position="absolute",
    norm="layer_norm:epsilon=1e-12",
    norm_placement="post",
    mlp_activations=("gelu_erf",),
    mlp_bias=True,
    attention_bias=True,
    embedding_norm=True,
    parametrisation="normal",
    # As in t5-experiments.
    rotary_fraction=0.25,
)
# Families by name.
FAMILIES = Registry(
    "families",
    {
        # BERT (arXiv:1810.04805), as in google-research/bert and transformers.
        "bert": _BERT,
        # BERT with norms before sublayers and after the last layer, as in Megatron-LM. Kernels that
        # end a residual branch start smaller.
        "bert_pre_ln": replace(
            _BERT, norm_placement="pre", parametrisation="normal:scale_residual=true"
        ),
        # Llama (arXiv:2302.13971): rotary positions, SwiGLU, untied logits.
        "llama": _LLAMA,
        # T5X's `decoder_only` example: the decoder of T5 1.1 without an encoder, logits tied.
        "lm": FamilyFacts(DECODER),
        # T5 as first published (arXiv:1910.10683): ReLU, logits tied to the embedding.
        "t5_1_0": replace(_T5_1_1, mlp_activations=("relu",), tied_logits=True),
        # T5 1.1 and mT5 (arXiv:2010.11934): gated GELU, untied logits.
        "t5_1_1": _T5_1_1,
    },
)
