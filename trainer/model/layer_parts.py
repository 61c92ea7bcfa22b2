"""Parts of layers that are chosen by name: feed-forwards, places of norms, and numbers of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from trainer.model import facts
from trainer.model.config import ModelConfig
from trainer.model.feedforward import FeedForward, Mlp, NoFeedForward
from trainer.model.mixed_feedforward import MixedMlp
from trainer.model.norms import (
    BranchNorm,
    NormPlacement,
    PostNorm,
    PreNorm,
    PreNormWithoutResidual,
)
from trainer.model.options import Halves

# A `spec.LayerSpec`.
_Layer = TypeVar("_Layer")


def halves(layer: _Layer, count: int, options: Halves) -> tuple[_Layer, ...]:
    """Returns layers like `layer` with other numbers of heads in the halves of a stack.

    The first half is the shorter one if `count` is odd.

    Source: "scaling_heads" of MARCH (2023).
    """

    def scaled(mixer: Any, share: float) -> Any:
        if mixer is None:
            return None
        heads = round(mixer.num_heads * share)
        width = mixer.num_heads * mixer.head_dim // heads if options.constant else mixer.head_dim
        return replace(mixer, num_heads=heads, head_dim=width)

    slots = ("mixer", "cross_mixer", "database_mixer")
    first, second = (
        replace(cast(Any, layer), **{slot: scaled(getattr(layer, slot), share) for slot in slots})
        for share in (options.first, options.second)
    )
    return (first,) * (count // 2) + (second,) * (count - count // 2)


def _mlp(config: ModelConfig, options: Any) -> FeedForward:
    activations, bias = config.value("mlp_activations"), config.value("mlp_bias")
    return Mlp(config.mlp_dim, activations, _drops_hidden(config), bias)


def _mixed_mlp(config: ModelConfig, options: Any) -> FeedForward:
    drops, bias = _drops_hidden(config), config.value("mlp_bias")
    return MixedMlp(config.mlp_dim, options.mean, options.sigmoid_dropout, drops, bias)


def _drops_hidden(config: ModelConfig) -> bool:
    """Returns whether hidden units are dropped, as in T5; BERT and its like drop only outputs."""
    return config.architecture != facts.ENCODER


# Feed-forward sublayers by configuration and options.
FEED_FORWARDS: Mapping[str, Callable[[ModelConfig, Any], FeedForward]] = MappingProxyType(
    {"mixed": _mixed_mlp, "mlp": _mlp, "none": lambda *_: NoFeedForward()}
)


class Placements(NamedTuple):
    """Placements of the norms of a layer; None: that of its other sublayers."""

    sublayers: NormPlacement
    feed_forward: NormPlacement | None = None
    mixer: NormPlacement | None = None


# Placements by name.
NORM_PLACEMENTS: Mapping[str, Placements] = MappingProxyType(
    {
        "pre": Placements(PreNorm()),
        "pre_without_mixer_residual": Placements(PreNorm(), mixer=PreNormWithoutResidual()),
        "post": Placements(PostNorm()),
        "primer_alternating": Placements(PreNorm(), feed_forward=BranchNorm()),
    }
)
