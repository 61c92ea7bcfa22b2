"""Parts of a model: a norm, and a mixer with a setting of its own."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import linen as nn

from tasks.terminal.flag_fields import above, field
from trainer.model.norms import ScaledNorm
from trainer.model.parameters import KERNEL, parameter
from trainer.model.part_facts import MixerFacts
from trainer.model.slot import Part


@dataclass(frozen=True)
class MagnitudeNorm(ScaledNorm):
    """Division by the mean magnitude of the channels."""

    def normalised(self, x_BLD):
        return x_BLD / (jnp.abs(x_BLD).mean(-1, keepdims=True) + self.epsilon)


@dataclass(frozen=True)
class Reach:
    """The mixer's settings."""

    reach: int = field(2, "positions on each side that a position sees", rule=above(0))


@dataclass(frozen=True)
class Neighbours:
    """Each position gets the mean of its neighbours, projected."""

    reach: int
    num_heads: int = 1
    products_per_pair: int = 0

    def build(self, shared, name):
        return _Neighbours(self.reach, shared, name=name)


class _Neighbours(nn.Module):
    reach: int
    shared: object

    @nn.compact
    def __call__(self, x_BLD, source_BSD, view, deterministic):
        distance_LS = jnp.arange(x_BLD.shape[1])[:, None] - jnp.arange(source_BSD.shape[1])
        seen_BLS = (view.mask_BLS & (abs(distance_LS) <= self.reach)).astype(x_BLD.dtype)
        share_BLS = seen_BLS / jnp.maximum(seen_BLS.sum(-1, keepdims=True), 1)
        start, shape = nn.initializers.normal(0.1), (x_BLD.shape[-1],) * 2
        matrix_DD = parameter(self, KERNEL, "matrix", start, ("embed", "mlp"), shape)
        mean_BLD: jax.Array = jnp.einsum("bls,bsd->bld", share_BLS, source_BSD)
        return mean_BLD @ matrix_DD


MAGNITUDE = Part(lambda config, options: MagnitudeNorm())
NEIGHBOURS = Part(
    lambda config, options: Neighbours(options.reach),
    MixerFacts(positions=("absolute",)),
    options=Reach,
)
