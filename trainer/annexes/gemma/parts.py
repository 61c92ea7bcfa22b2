"""The families of Gemma and T5Gemma, and T5Gemma 2's cross-attention. No JAX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.model.part_facts import ENCODER_DECODER, CrossFacts, FamilyFacts
from trainer.model.registry import FAMILIES, require_selecting_mixer
from trainer.model.slot import Part, require_of

# Source: Gemma (arXiv:2403.08295).
GEMMA = replace(
    FAMILIES["llama"],
    norm="rms_norm:gain=offset",
    mlp_activations=("gelu", "linear"),
    scale_embeddings=True,
    tied_logits=True,
    types=("llama",),
)
# Source: Zhang et al. 2025 (arXiv:2504.06225), section 3.
T5GEMMA = FamilyFacts(
    ENCODER_DECODER,
    position="rotary",
    norm="rms_norm:gain=offset",
    norm_placement="sandwich",
    mlp_activations=("gelu", "linear"),
    scale_embeddings=True,
    parametrisation="normal:scale_residual=true",
)


def _check_merged(config: Any, options: Any) -> None:
    require_selecting_mixer(config, "cross_attention 'merged'")
    position = config.part("position")
    scaling = getattr(position.options, "scaling", "none")
    fits = scaling != "yarn" or position.options.cross
    rule = "with cross=true if it scales by yarn and cross_attention is 'merged'"
    require_of(config, fits, "position", rule)
    rule = "a different one with cross_attention 'merged', whose mask kernels do not support"
    require_of(config, config.attention != "pallas", "attention", rule)
    rule = "'none' with cross_attention 'merged'"
    require_of(config, config.parallel_blocks == "none", "parallel_blocks", rule)


MERGED = Part("trainer.annexes.gemma.merged:merged", CrossFacts(merges=True), check=_check_merged)
