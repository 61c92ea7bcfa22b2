"""A feed-forward sublayer that adds two activations instead of multiplying them.

Dimensions: B batch, L length, D model, F mlp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from trainer.model.dense import Dropout, Shared
from trainer.model.feedforward import drops_hidden
from trainer.model.masks import Rows


@dataclass(frozen=True)
class MixedMlp:
    """(sigmoid(W0 x) + relu(W1 x)) / 2, projected back; without `mean` it is not halved.

    `sigmoid_dropout` is the dropout rate of sigmoids before the sum. `dropout` drops hidden units
    after it, as in `Mlp`.

    Source: "mixed_act" of MARCH (2023), a zoo of T5's variants.
    """

    mlp_dim: int
    mean: bool = True
    sigmoid_dropout: float = 0.0
    dropout: bool = True
    bias: bool | None = None
    activations = ()
    routes = False
    pointwise = True
    exports = ()

    def build(self, shared: Shared, name: str) -> nn.Module:
        return _MixedMlp(self, shared, name=name)


class _MixedMlp(nn.Module):
    spec: MixedMlp
    shared: Shared

    @nn.compact
    def __call__(self, x_BLD: jax.Array, rows: Rows | None, deterministic: bool) -> jax.Array:
        spec, shared, parametrisation = self.spec, self.shared, self.shared.parametrisation

        def project(name: str) -> jax.Array:
            axes, initializer = ("embed", "mlp"), parametrisation.feed_forward()
            return shared.dense(spec.mlp_dim, axes, initializer, name, bias=spec.bias)(x_BLD)

        gate = Dropout(spec.sigmoid_dropout, shared.broadcast_dropout)
        hidden_BLF = gate(nn.sigmoid(project("wi_0")), deterministic) + nn.relu(project("wi_1"))
        if spec.mean:
            hidden_BLF /= 2
        if spec.dropout:
            hidden_BLF = shared.dropout()(hidden_BLF, deterministic)
        initializer = parametrisation.feed_forward_out()
        axes = ("mlp", "embed")
        return shared.dense(shared.emb_dim, axes, initializer, "wo", bias=spec.bias)(hidden_BLF)


def mixed(config: Any, options: Any) -> MixedMlp:
    """Returns the sublayer for `march.Mixed`."""
    drops, bias = drops_hidden(config), config.value("mlp_bias")
    return MixedMlp(config.mlp_dim, options.mean, options.sigmoid_dropout, drops, bias)
