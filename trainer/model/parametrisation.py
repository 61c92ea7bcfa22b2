"""Parametrisations: how a tensor's initial values, multiplier and learning rate depend on width."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from flax import linen as nn
from jax import Array

from trainer.model.registry import MaximalUpdate, Normal

Initializer = Callable[..., Array]
Shape = tuple[int, ...]


class Rates(NamedTuple):
    """A tensor's learning rate and initial size relative to the base model's.

    `rate` is the learning-rate factor for optimizers whose updates do not grow with the gradient
    (Adam, Lion). Optimizers with updates proportional to parameter size need only `rate / size`.
    """

    rate: float = 1.0
    size: float = 1.0


# Rates of a tensor that learns exactly as in the base model.
UNCHANGED = Rates()


def _as_in_base(shape: Shape) -> Rates:
    return UNCHANGED


@dataclass(frozen=True)
class Start:
    """An initializer, and a function from a tensor's shape to its `Rates`."""

    initializer: Initializer
    rates: Callable[[Shape], Rates] = _as_in_base

    def __call__(self, key: Array, shape: Shape, dtype: Any = None) -> Array:
        return self.initializer(key, shape, dtype)


def _rates(initializer: Initializer) -> Callable[[Shape], Rates]:
    return initializer.rates if isinstance(initializer, Start) else _as_in_base


def narrowed(initializer: Initializer, factor: float) -> Initializer:
    """Returns an initializer that multiplies another's values by `factor`."""
    if factor == 1:
        return initializer

    def start(key: Array, shape: Shape, dtype: Any = None) -> Array:
        return factor * initializer(key, shape, dtype)

    return Start(start, _rates(initializer))


@dataclass(frozen=True)
class StandardParametrisation:
    """T5X's parametrisation: kernels N(0, 1 / fan_in), token embedding N(0, 1).

    The base class, which defines every initializer, multiplier and learning rate. Tensors whose
    initializer is not a `Start` learn as in the base model.

    Attention logits are not scaled at run time: 1 / sqrt(head_dim) is folded into the initial query
    kernel. A different `scale` changes the kernel to keep the first logits the same. `zeros` names
    kernels that start at 0: "query", "residual" (ends of residual branches), "logits".

    Source: google-research/t5x, `t5x/examples/t5/layers.py` and `network.py`.
    """

    scale: float | None = None
    zeros: tuple[str, ...] = ()

    def unless_zero(self, name: str, initializer: Initializer) -> Initializer:
        if name not in self.zeros:
            return initializer
        rates = _rates(initializer)
        # The ratio of initial sizes is undefined for a tensor that starts at 0.
        return Start(nn.initializers.zeros, lambda shape: Rates(rates(shape).rate))

    def embedding(self) -> Initializer:
        return nn.initializers.normal(1.0)

    def query(self, head_dim: int) -> Initializer:
        rest = 1.0 / head_dim / self.attention_scale(head_dim) ** 2
        return self.unless_zero("query", nn.initializers.variance_scaling(rest, "fan_in", "normal"))

    def attention(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_in", "normal")

    def attention_out(self) -> Initializer:
        return self.unless_zero("residual", self.attention())

    def attention_scale(self, head_dim: int) -> float:
        return 1.0 if self.scale is None else self.scale

    def conditional_query(self) -> Initializer:
        """Returns N(0, 1 / (fan_in * fan_out)), for every kernel that computes a conditional query.

        Source: t5-experiments, `modeling_t5.py`, `_init_weights`.
        """

        def initializer(key: Array, shape: Shape, dtype: Any = None) -> Array:
            return nn.initializers.normal((shape[-2] * shape[-1]) ** -0.5)(key, shape, dtype)

        return initializer

    def feed_forward(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

    def feed_forward_out(self) -> Initializer:
        return self.unless_zero("residual", self.feed_forward())

    def logits(self) -> Initializer:
        return self.unless_zero("logits", self.feed_forward())

    def relative_bias(self) -> Initializer:
        return nn.initializers.variance_scaling(1.0, "fan_avg", "uniform")

    def tied_logits_multiplier(self, emb_dim: int) -> float:
        """Returns the factor that gives logits tied to an N(0, 1) embedding about unit size."""
        return emb_dim**-0.5


@dataclass(frozen=True)
class NormalParametrisation(StandardParametrisation):
    """BERT's and GPT-2's parametrisation: all parameters N(0, 0.02), truncated at two deviations.

    Attention logits are scaled by 1 / sqrt(head_dim) at run time. Kernels that end a residual
    branch start smaller by sqrt(`residual_branches`), where `residual_branches` is the number of
    branches that a pre-norm stack sums (twice its layers).

    Source: google-research/bert, `modeling.py`, `create_initializer`, for 0.02 and truncation,
    which lowers the real deviation to 0.0176 there too; Megatron-LM, `scaled_init_method_normal`.
    """

    deviation: float = 0.02
    residual_branches: int = 1

    def embedding(self) -> Initializer:
        return nn.initializers.truncated_normal(self.deviation)

    attention = conditional_query = feed_forward = relative_bias = embedding

    def query(self, head_dim: int) -> Initializer:
        return self.unless_zero("query", self.attention())

    def attention_out(self) -> Initializer:
        deviation = self.deviation / self.residual_branches**0.5
        return self.unless_zero("residual", nn.initializers.truncated_normal(deviation))

    feed_forward_out = attention_out

    def attention_scale(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def tied_logits_multiplier(self, emb_dim: int) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class MaximalUpdateParametrisation(StandardParametrisation):
    """muP: updates change states as much as possible, equally at every width.

    Kernels start as N(0, 1 / fan_in), with nothing folded into the queries, and learn at
    `base_width / width` (rule "relative") or 1 / fan_in ("absolute") of the learning rate. Tables,
    gains and biases learn at the full rate. Attention logits are scaled by 1 / head_dim.
    `readout` sets the deviation of the logits kernel or, with tied logits, the factor of the
    logits. `width` is this model's emb_dim, `base_width` the emb_dim of the model whose learning
    rate was tuned.

    Source: Yang et al. 2022 (arXiv:2203.03466), table 8; Lingle 2024 (arXiv:2404.05728), for the
    absolute rule and readouts of 1 / width; Yang and Hu 2021 (arXiv:2011.14522).
    """

    width: int
    base_width: int
    rule: str = "relative"
    readout: str = "inverse"

    def _hidden(self, initializer: Initializer) -> Start:
        return Start(initializer, lambda shape: self._rates(shape, 0.5))

    def _rates(self, shape: Shape, falls: float) -> Rates:
        """Returns the rates of a kernel whose initial deviation falls as fan_in ** -`falls`."""
        ratio = self.base_width / self.width if self.rule == "relative" else 1.0 / shape[-2]
        return Rates(ratio, ratio**falls)

    def query(self, head_dim: int) -> Initializer:
        return self.unless_zero("query", self.attention())

    def attention(self) -> Initializer:
        return self._hidden(super().attention())

    def attention_scale(self, head_dim: int) -> float:
        return 1.0 / head_dim if self.scale is None else self.scale

    def conditional_query(self) -> Initializer:
        return self.attention()

    def feed_forward(self) -> Initializer:
        return self._hidden(super().feed_forward())

    def relative_bias(self) -> Initializer:
        # T5X's deviation for a few heads; it must not depend on the number of heads, a width.
        return nn.initializers.normal(0.25)

    def logits(self) -> Initializer:
        initializer = nn.initializers.normal(self.tied_logits_multiplier(self.width))
        if self.readout == "zero":
            initializer = nn.initializers.zeros
        falls = {"standard": 0.5, "zero": 0.0}.get(self.readout, 1.0)
        start = Start(initializer, lambda shape: self._rates(shape, falls))
        return self.unless_zero("logits", start)

    def tied_logits_multiplier(self, emb_dim: int) -> float:
        if self.readout == "inverse":
            return 1.0 / emb_dim
        if self.readout == "relative":
            return self.base_width**0.5 / emb_dim
        return emb_dim**-0.5


STANDARD = StandardParametrisation()


def normal(config: Any, options: Normal) -> NormalParametrisation:
    layers = max(config.num_encoder_layers, config.num_decoder_layers)
    branches = 2 * layers if options.scale_residual else 1
    return NormalParametrisation(deviation=options.deviation, residual_branches=branches)


def mup(config: Any, options: MaximalUpdate) -> MaximalUpdateParametrisation:
    return MaximalUpdateParametrisation(width=config.emb_dim, **vars(options))
