"""Model configuration: plain data, no JAX."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from tasks.terminal.flag_fields import REQUIRED, ReadIf, field, one_of, require
from trainer.model.attention_cores import CORES, EINSUM, Request, select
from trainer.model.config_checks import SIZES, check
from trainer.model.device import AUTO, SOFTMAX_DTYPES, Device
from trainer.model.part_facts import ARCHITECTURES, FamilyFacts, MixerFacts, StackPartFacts
from trainer.model.registry import (
    ACTIVATION_NAMES,
    FAMILIES,
    FULL_PATTERN,
    JOINED,
    SLOTS,
    STACK_PARTS,
    WEIGHT_NAMES,
)
from trainer.model.slot import Choice, Slot, several

_ENCODER_ONLY = ReadIf(
    lambda config: not config.model.has_decoder, "in a model with a decoder", whole=True
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model: its family, its sizes, and the parts that differ from the family's parts.

    None selects the family's part, which `value` resolves. A part may have options, as in
    "rotary:base=500000"; `part` reads them. Parameters are float32 whatever `dtype` is.
    Construction raises `Rejected` if a value is invalid or has no effect.
    """

    family: str = field(
        "t5_1_1",
        "architecture of the model; mT5 is t5_1_1 with its own vocab_size",
        choices=FAMILIES,
    )
    vocab_size: int = field(REQUIRED, "number of rows in the token embedding, at least one per id")
    emb_dim: int = field(REQUIRED, "width of the residual stream")
    num_heads: int = field(REQUIRED, "number of attention heads in each layer")
    head_dim: int = field(REQUIRED, "width of a head; num_heads * head_dim need not be emb_dim")
    mlp_dim: int = field(REQUIRED, "hidden width of the feed-forward sublayers")
    num_encoder_layers: int = field(
        REQUIRED, "number of encoder layers; 0 in families without an encoder"
    )
    num_decoder_layers: int = field(
        REQUIRED,
        "number of decoder layers; 0 in families without a decoder",
    )
    start_id: int | None = field(
        None,
        "id that the decoder reads first; None: the vocabulary's BOS, else its padding or EOS",
        read_if=ReadIf(
            lambda config: config.model.has_decoder, "in an encoder-only model", whole=True
        ),
    )
    dropout_rate: float = field(
        0.0, "share of units dropped in training, in [0, 1)", often="dropout"
    )
    dtype: str = field(
        "float32",
        "type of activations; parameters are always float32",
        choices=("float32", "bfloat16"),
        often="type of activations",
    )
    tied_logits: bool | None = field(
        None, "use the token embedding for logits; None follows the family"
    )
    logits_scale: float | None = field(
        None,
        "factor of the logits; None means 1, but for tied logits emb_dim ** -0.5 in T5 and Primer, "
        "and muP's factor in muP",
    )
    logits_softcap: float | None = field(
        None,
        "limit c of logits x, which become c * tanh(x / c), as in Gemma 2; None: no limit",
    )
    mlp_activations: tuple[str, ...] | None = field(
        None,
        "activations that the feed-forward sublayer multiplies, separated by commas, from "
        f"{', '.join(ACTIVATION_NAMES)}; None uses the family's",
    )
    position: str | None = field(
        None,
        "encoding of positions: a table (absolute) or sines (sinusoidal) added to the embeddings; "
        "T5's attention biases, shared by a stack's layers (relative) or learned by each layer as "
        "in T5X's scalable_t5 and umT5 (relative_per_layer); ALiBi's fixed biases (alibi); "
        "rotated queries and keys (rotary); or none; options as in rotary:base=500000; None "
        "uses the family's",
        choices=SLOTS["position"],
    )
    max_positions: int = field(
        512,
        "maximum length of a row, in tokens, with absolute positions or a Synthesizer",
        read_if=ReadIf(
            lambda config: config.model.counts_positions,
            "without --model.position=absolute or a Synthesizer",
            whole=True,
        ),
    )
    mixer: str | None = field(
        None,
        "sublayer that mixes positions, except for cross-attention; None means attention",
        choices=SLOTS["mixer"],
    )
    attention_pattern: str = field(
        FULL_PATTERN,
        "blocks of keys that self-attention sees: all (full), or those of a pattern; --help=parts "
        "lists them",
        choices=SLOTS["attention_pattern"],
    )
    num_kv_heads: int | None = field(
        None,
        "number of heads of keys and values, each shared by num_heads / num_kv_heads query "
        "heads: grouped-query attention, or multi-query if 1; None means num_heads",
    )
    query_key_norm: bool = field(
        False, "normalise the queries and keys of each head with `norm`, before they are rotated"
    )
    query_key_norm_over: str = field(
        "head",
        "channels that query_key_norm normalises together: each head's (head), or all heads' "
        "(joined), as in OLMo 2",
        choices=("head", JOINED),
        read_if=ReadIf(
            lambda config: config.model.query_key_norm, "without --model.query_key_norm", whole=True
        ),
    )
    attention_scale: float | None = field(
        None,
        "factor for attention logits; the standard parametrisation folds the rest of head_dim ** "
        "-0.5 into the initial queries; None uses the parametrisation's own (1 in T5)",
    )
    attention_softcap: float | None = field(
        None,
        "limit c of scaled attention logits x, which become c * tanh(x / c), as in Gemma 2; by "
        "default there is no limit",
    )
    attention_window: str = field(
        "none",
        "how far layers see: everything (none), or in some layers only a window (sliding); options "
        "as in sliding:window=4096,layers=lg, where the letters, repeated, make layers local or "
        "global",
        choices=SLOTS["attention_window"],
    )
    attention_weights: str = field(
        "softmax",
        "attention weights: softmax of the logits; or elu(x) + 1 (elu) or relu(x)^2 "
        "(squared_relu), divided by the number of keys that a query sees, or by their sum "
        "(norm_elu, norm_squared_relu)",
        choices=WEIGHT_NAMES,
    )
    zero_init: tuple[str, ...] = field(
        (),
        "kernels that start at 0, separated by commas: for queries (query), at the end of a "
        "residual branch (residual), or for untied logits (logits)",
    )
    norm: str | None = field(
        None,
        "norm of the layers; options as in rms_norm:epsilon=1e-5,gain=none; None uses the family's",
        choices=SLOTS["norm"],
    )
    norm_placement: str | None = field(
        None,
        "norms before every sublayer (pre), or before every sublayer but a stack's first "
        "(pre_but_first); after every sum as in BERT (post); of every sublayer's output (branch), "
        "or of its input and output (sandwich); --help=parts lists more; None uses the family's",
        choices=SLOTS["norm_placement"],
    )
    parallel_blocks: str = field(
        "none",
        "let a layer's sublayers read the same states and add their outputs, with one norm for "
        "the layer (one_norm, as in GPT-J and PaLM) or one for each sublayer (two_norms, as in "
        "GPT-NeoX)",
        choices=SLOTS["parallel_blocks"],
    )
    encoder_sizes: tuple[str, ...] = field(
        (),
        f"sizes of the encoder that differ from the decoder's, some of {', '.join(SIZES)}, as in "
        "emb_dim=3584,num_heads=16; needs shared_embedding=false",
    )
    shared_embedding: bool = field(
        True,
        "one token embedding for encoder and decoder, as in T5; false: each has its own, as in "
        "T5Gemma, and tied logits use the decoder's",
    )
    embedding_norm: bool | None = field(
        None, "normalise embeddings before the first layer; None follows the family"
    )
    token_types: int = field(
        2,
        "number of token types, each with a vector that an encoder-only model adds to its "
        "embeddings: BERT has 2, for the segments of a row; 1 adds the same vector everywhere, as "
        "in RoBERTa; 0 adds none",
        read_if=_ENCODER_ONLY,
    )
    scale_embeddings: bool | None = field(
        None, "multiply token embeddings by sqrt(emb_dim); None follows the family"
    )
    mlp_bias: bool | None = field(
        None,
        "use biases in feed-forward sublayers, except in experts; None follows the family",
    )
    attention_bias: bool | None = field(
        None, "use biases in attention projections; None follows the family"
    )
    attention_out_bias: bool | None = field(
        None,
        "use a bias in the last projection of attention, whatever attention_bias says of the "
        "others, as in Qwen 2; None follows attention_bias",
    )
    head_bias: bool = field(
        True,
        "use a bias in the projection before the logits of an encoder-only model",
        read_if=_ENCODER_ONLY,
    )
    parametrisation: str | None = field(
        None,
        "initial values, multipliers and learning rates of tensors: T5's (standard), one normal "
        "distribution (normal), or muP's (mup), under which the best "
        "learning rate stays the same when emb_dim grows; options as in mup:base_width=256; "
        "None uses the family's",
        choices=SLOTS["parametrisation"],
    )
    feed_forward: str = field(
        "mlp",
        "sublayer that acts on each position by itself: products of mlp_activations (mlp), or "
        "none; --help=parts lists more",
        choices=SLOTS["feed_forward"],
        read_if=ReadIf(
            lambda config: config.model.idle_feed_forward is None,
            lambda config: config.model.idle_feed_forward,
            whole=True,
        ),
    )
    cross_attention: str = field(
        "attention",
        "what a decoder layer attends to: the encoder's last states (attention); --help=parts "
        "lists more",
        choices=SLOTS["cross_attention"],
    )
    stack_parts: str = field(
        "none",
        "parts of whole stacks, with options, joined by '+'; --help=parts lists them",
        choices=STACK_PARTS,
    )
    upstream_compat: bool = field(
        False,
        "let convolutions and Synthesizers see other packed examples, as in Primer's code",
    )
    scan_layers: bool = field(
        False,
        "compile one layer and run it for all, so that compile time does not depend on depth; "
        "results are the same, except that dropout draws different units",
    )
    remat: str = field(
        "none",
        "activations kept for the backward pass: all (none), outputs of products with kernels "
        "(dots), or each layer's input (full), which adds a third to the operations; on a CPU this "
        "saves memory only together with scan_layers",
        choices=("none", "dots", "full"),
        often="activations to recompute",
        changes="rounding",
    )
    attention: str = field(
        AUTO,
        "implementation of attention: products written out, the fastest on a CPU (einsum), "
        "jax.nn.dot_product_attention (dot_product), or cuDNN's fused kernel for NVIDIA GPUs and "
        "bfloat16 (cudnn), neither of which drops weights; others are kernels for accelerators; "
        "auto: such kernels where they compute the model and are expected to be faster, or else "
        "einsum",
        choices=(AUTO, *CORES),
        changes="rounding",
    )
    softmax_dtype: str = field(
        AUTO,
        "type of attention's logits and softmax where no fused kernel computes them; kernels use "
        "float32; auto: float32, but the type of activations on a TPU, as in T5X",
        choices=SOFTMAX_DTYPES,
        changes="rounding",
    )

    @property
    def of_encoder(self) -> ModelConfig:
        """This model with the encoder's sizes in both stacks; itself if they are the same."""
        if not self.encoder_sizes:
            return self
        pairs = (text.split("=") for text in self.encoder_sizes)
        sizes: dict[str, Any] = {name: int(size) for name, size in pairs}
        return replace(self, encoder_sizes=(), **sizes)

    @property
    def family_facts(self) -> FamilyFacts:
        return FAMILIES[self.family]

    def value(self, name: str) -> Any:
        """Returns a field's value, or the family's value if the field is None."""
        own = getattr(self, name)
        return getattr(self.family_facts, name) if own is None else own

    def part(self, slot: str) -> Choice:
        """Returns the part and options that fill one of SLOTS; raises `Rejected` if invalid."""
        return SLOTS[slot].parse(self.value(slot))

    def facts(self, slot: str) -> Any:
        return SLOTS[slot][self.part(slot).name].facts

    def build(self, slot: str, *arguments: Any) -> Any:
        name, options = self.part(slot)
        return SLOTS[slot][name].build(self, options, *arguments)

    @property
    def stack_choices(self) -> dict[str, Choice]:
        """This model's stack parts by name; raises `Rejected` if one is invalid."""
        return several(STACK_PARTS, self.stack_parts)

    @property
    def stack_facts(self) -> dict[str, StackPartFacts]:
        """Facts about this model's stack parts, by name."""
        return {name: STACK_PARTS[name].facts for name in self.stack_choices}

    def _lengthening(self) -> dict[str, int]:
        choices = self.stack_choices.values()
        return {
            str(choice): number
            for choice in choices
            if (number := STACK_PARTS[choice.name].facts.lengthens(choice.options))
        }

    @property
    def lengthening(self) -> int:
        return sum(self._lengthening().values())

    @property
    def unpackable(self) -> str | None:
        """The flag and value of a part that requires unpacked rows, or None."""
        return next((f"--model.stack_parts={text}" for text in self._lengthening()), None)

    def idle_on(self, inputs: int) -> str | None:
        """Returns which part has no effect on rows of `inputs` tokens and why, or None."""
        for name, choice in self.stack_choices.items():
            if why := STACK_PARTS[name].facts.idle(self, choice.options, inputs):
                return f"--model.stack_parts={choice} has no effect {why}"
        return None

    def explicit(self) -> ModelConfig:
        """Returns the same model with each None replaced by the family's value."""
        family = {field.name for field in fields(FamilyFacts)}
        values = {
            each.name: self.value(each.name)
            for each in fields(self)
            if each.name in family and getattr(self, each.name) is None
        }
        return replace(self, **values) if self.family_facts.changeable else self

    @property
    def mixer_facts(self) -> MixerFacts:
        return self.facts("mixer")

    @property
    def architecture(self) -> str:
        return self.family_facts.architecture

    @property
    def has_encoder(self) -> bool:
        return ARCHITECTURES[self.architecture].encoder

    @property
    def has_decoder(self) -> bool:
        return ARCHITECTURES[self.architecture].decoder

    @property
    def has_both_stacks(self) -> bool:
        return self.has_encoder and self.has_decoder

    @property
    def position_scheme(self) -> str:
        return self.part("position").name

    @property
    def rotated_channels(self) -> float:
        """Number of a head's channels that rotary positions rotate, a whole number if they fit."""
        fraction = self.part("position").options.fraction
        if fraction is None:
            fraction = self.family_facts.rotary_fraction
        channels: float = self.head_dim * fraction
        # Allow for fractions given as rounded decimals, such as 0.33333 for a third.
        return round(channels) if abs(channels - round(channels)) < 1e-3 else channels

    @property
    def counts_positions(self) -> bool:
        """True if rows are limited to `max_positions`."""
        return self.facts("position").counts_positions or self.mixer_facts.counts_positions

    @property
    def longest_text(self) -> int | None:
        """The tokens of the longest row, beside memory tokens; None if there is no limit."""
        return self.max_positions - self.lengthening if self.counts_positions else None

    def attention_on(self, device_kind: str) -> str:
        """Returns the attention implementation for training on JAX's `device_kind`."""
        if not self.mixer_facts.cores:
            return EINSUM
        return select(self.attention, self.attention_request(Device(device_kind))).name

    def attention_request(self, device: Device | None = None) -> Request:
        """Returns what layers ask of an attention core, as far as it is known without rows."""
        name, pattern = self.part("attention_pattern")
        drops, window = self.dropout_rate > 0, self.facts("attention_window")
        return Request(
            dtype=self.dtype,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            device=device,
            weights=self.attention_weights,
            masked=window.fuses and not self.facts("cross_attention").merges,
            capped=self.attention_softcap is not None,
            by_distance=self.facts("position").fuses,
            watched=any(facts.reads_weights for facts in self.stack_facts.values()),
            drops=drops,
            # Elsewhere all queries drop the same weights.
            drops_by_query=drops and not self.has_decoder,
            pattern=None if name == FULL_PATTERN else pattern,
        )

    @property
    def idle_feed_forward(self) -> str | None:
        """Why the feed-forward part has no effect in this model, or None."""
        why: str | None = self.facts("feed_forward").idle(self, self.part("feed_forward").options)
        return why

    def __post_init__(self) -> None:
        for each in fields(self):
            allowed, value = each.metadata["choices"], getattr(self, each.name)
            if allowed and not isinstance(allowed, Slot):
                require(value in allowed, each.name, value, one_of(allowed))
        self._spell_parts()
        check(self)

    def _spell_parts(self) -> None:
        """Lists only changed options of parts, in a fixed order: equal parts have equal text."""
        texts = {slot: str(self.part(slot)) for slot in SLOTS if getattr(self, slot) is not None}
        texts["stack_parts"] = "+".join(map(str, self.stack_choices.values())) or "none"
        for slot, text in texts.items():
            object.__setattr__(self, slot, text)


def encoder_sizes(encoder: ModelConfig, decoder: ModelConfig) -> tuple[str, ...]:
    """Returns the field `encoder_sizes` of a model whose stacks have two models' sizes."""

    def sizes(model: ModelConfig) -> dict[str, int]:
        named = {name: getattr(model, name) for name in SIZES}
        return {**named, "num_kv_heads": model.num_kv_heads or model.num_heads}

    own = sizes(decoder)
    return tuple(f"{name}={size}" for name, size in sizes(encoder).items() if size != own[name])
