"""Parts of stacks that are chosen by name: norms, position schemes and parametrisations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainer.model.config import ModelConfig
from trainer.model.dynamic_tanh import DynamicTanh
from trainer.model.norms import LayerNorm, Norm, PrimerNorm, RMSNorm
from trainer.model.parametrisation import (
    MaximalUpdateParametrisation,
    NormalParametrisation,
    PrimerParametrisation,
    StandardParametrisation,
)
from trainer.model.positions import (
    AlibiPosition,
    LearnedPosition,
    NoPosition,
    Position,
    RotaryPosition,
    RotaryScaling,
    SinusoidalPosition,
    T5RelativePosition,
)

# Parametrisations by configuration and options.
PARAMETRISATIONS: Mapping[str, Callable[[ModelConfig, Any], StandardParametrisation]] = (
    MappingProxyType(
        {
            "standard": lambda config, _: StandardParametrisation(),
            # Source: google-research/primer, `gin/models/switch_*.gin` for 0.1.
            "primer": lambda config, options: PrimerParametrisation(
                variance=options.scale or (0.1 if config.num_experts else 1.0)
            ),
            "normal": lambda config, options: NormalParametrisation(
                deviation=options.deviation,
                residual_branches=2 * max(config.num_encoder_layers, config.num_decoder_layers)
                if options.scale_residual
                else 1,
            ),
            "mup": lambda config, options: MaximalUpdateParametrisation(
                width=config.emb_dim,
                base_width=options.base_width,
                rule=options.rule,
                readout=options.readout,
            ),
        }
    )
)


def _build_with(norm: Callable[..., Norm]) -> Callable[[Any], Norm]:
    return lambda options: norm(options.epsilon, options.gain)


# Norms by their options.
NORMS: Mapping[str, Callable[[Any], Norm]] = MappingProxyType(
    {
        "dynamic_tanh": lambda options: DynamicTanh(options.alpha),
        "rms_norm": _build_with(RMSNorm),
        "layer_norm": lambda options: LayerNorm(options.epsilon, options.gain, options.bias),
        "primer_norm": _build_with(PrimerNorm),
    }
)


def _relative(per_layer: bool) -> Callable[[ModelConfig, Any, bool], Position]:
    return lambda config, options, bidirectional: T5RelativePosition(
        bidirectional, options.num_buckets, options.max_distance, per_layer
    )


def _rotary(config: ModelConfig, options: Any, bidirectional: bool) -> Position:
    scaling = None
    if options.scaling == "linear":
        scaling = RotaryScaling("linear", options.factor)
    elif options.scaling == "llama3":
        scaling = RotaryScaling(
            "llama3",
            options.factor,
            options.low_frequency,
            options.high_frequency,
            options.original_positions,
        )
    return RotaryPosition(int(config.rotated_channels), options.base, options.cross, scaling)


# Position schemes of a stack, by configuration, options, and whether its positions look both ways.
POSITIONS: Mapping[str, Callable[[ModelConfig, Any, bool], Position]] = MappingProxyType(
    {
        "absolute": lambda config, *_: LearnedPosition(config.max_positions),
        "alibi": lambda config, *_: AlibiPosition(config.head_dim),
        "none": lambda *_: NoPosition(),
        "relative": _relative(per_layer=False),
        "relative_per_layer": _relative(per_layer=True),
        "rotary": _rotary,
        "sinusoidal": lambda config, options, _: SinusoidalPosition(options.base),
    }
)
