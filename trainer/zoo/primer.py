"""Primer and the models compared with it: Synthesizer and Evolved Transformer. No JAX.

Source: So et al. 2021 (arXiv:2109.08668); google-research/primer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tasks.terminal.fields import above, field
from trainer.model.capabilities import DECODER, TRANSFORMERS, FamilyFacts, MixerFacts
from trainer.model.parts import ATTENTION, FAMILIES, NormOptions, register
from trainer.model.slots import Part, constant, of_options

_CONVOLUTION, _SYNTHESIZER = "trainer.zoo.convolution:", "trainer.zoo.synthesizer:"
_MDHA = replace(ATTENTION, selects=False, convolves=True, exports=(TRANSFORMERS,))
register("mixer", "mdha", Part(_CONVOLUTION + "multi_dconv_head_attention", _MDHA))
register(
    "mixer",
    "mdha_shared_qk",
    Part(_CONVOLUTION + "with_shared_queries", replace(_MDHA, groups=False)),
)
register(
    "mixer",
    "dense_synthesizer",
    Part(_SYNTHESIZER + "dense", MixerFacts(rotates=False, counts_positions=True, caches=True)),
)
register(
    "mixer",
    "random_synthesizer",
    Part(_SYNTHESIZER + "random", MixerFacts(queries=True, counts_positions=True, caches=True)),
)
register(
    "norm",
    "primer_norm",
    Part(of_options("trainer.zoo.primer_parts:PrimerNorm"), options=NormOptions),
)
register(
    "norm_placement",
    "primer_alternating",
    Part(constant("trainer.zoo.primer_parts:ALTERNATING_NORMS")),
)


@dataclass(frozen=True)
class Primer:
    """Options of Mesh TensorFlow's initial values."""

    scale: float | None = field(
        None,
        "factor of the variance of feed-forward kernels; None means 0.1 with experts, otherwise 1",
        rule=above(0),
    )


register(
    "parametrisation", "primer", Part("trainer.zoo.primer_parts:parametrisation", options=Primer)
)

# Variants of Mesh TensorFlow's Transformer. The default parts give the paper's vanilla Transformer.
FAMILIES["primer"] = FamilyFacts(
    DECODER,
    norm="layer_norm",
    mlp_activations=("relu",),
    mlp_bias=True,
    parametrisation="primer",
)
# The Evolved Transformer's decoder (arXiv:1901.11117), as compared with Primer.
FAMILIES["evolved_transformer"] = replace(
    FAMILIES["primer"],
    mlp_activations=("silu",),
    # Its heads have two sizes, so no set of angles fits them all.
    positions=("absolute", "none", "relative", "sinusoidal"),
    changeable=False,
    convolves=True,
    skips_zero=True,
    layers=_CONVOLUTION + "evolved_layers",
    even=("head_dim", "emb_dim"),
)
