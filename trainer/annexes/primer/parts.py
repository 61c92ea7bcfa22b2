"""Primer and the models compared with it: Synthesizer and Evolved Transformer. No JAX.

Source: So et al. 2021 (arXiv:2109.08668); google-research/primer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.terminal.flag_fields import above, field
from trainer.model.part_facts import DECODER, TRANSFORMERS, FamilyFacts, MixerFacts
from trainer.model.registry import ATTENTION, NormOptions
from trainer.model.slot import Part, constant, of_options

_CONVOLUTION = "trainer.annexes.primer.convolution:"
_SYNTHESIZER = "trainer.annexes.primer.synthesizer:"
_MDHA = replace(ATTENTION, selects=False, convolves=True, exports=(TRANSFORMERS,))
MDHA = Part(_CONVOLUTION + "multi_dconv_head_attention", _MDHA)
MDHA_SHARED_QK = Part(_CONVOLUTION + "with_shared_queries", replace(_MDHA, groups=False))
DENSE_SYNTHESIZER = Part(
    _SYNTHESIZER + "dense", MixerFacts(rotates=False, counts_positions=True, caches=True)
)
RANDOM_SYNTHESIZER = Part(
    _SYNTHESIZER + "random", MixerFacts(queries=True, counts_positions=True, caches=True)
)
PRIMER_NORM = Part(of_options("trainer.annexes.primer.layers:PrimerNorm"), options=NormOptions)
PRIMER_ALTERNATING = Part(constant("trainer.annexes.primer.layers:ALTERNATING_NORMS"))


@dataclass(frozen=True)
class Primer:
    """Options of Mesh TensorFlow's initial values."""

    scale: float | None = field(
        None,
        "factor of the variance of feed-forward kernels; None means 0.1 with experts, otherwise 1",
        rule=above(0),
    )


PRIMER = Part("trainer.annexes.primer.layers:parametrisation", options=Primer)

# Variants of Mesh TensorFlow's Transformer. The default parts give the paper's vanilla Transformer.
FAMILY = FamilyFacts(
    DECODER,
    norm="layer_norm",
    mlp_activations=("relu",),
    mlp_bias=True,
    parametrisation="primer",
    types=("palimpsest", "llama"),
)
# The Evolved Transformer's decoder (arXiv:1901.11117), as compared with Primer.
EVOLVED_TRANSFORMER = replace(
    FAMILY,
    mlp_activations=("silu",),
    # Its heads have two sizes, so no set of angles fits them all.
    positions=("absolute", "none", "relative", "sinusoidal"),
    changeable=False,
    convolves=True,
    skips_zero=True,
    layers=_CONVOLUTION + "evolved_layers",
    even=("head_dim", "emb_dim"),
    types=(),
)
