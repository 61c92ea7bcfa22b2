"""A feed-forward sublayer that adds two activations instead of multiplying them.

Dimensions: B batch, L length, D model, F mlp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn

from trainer.model.dense import Built, Dropout
from trainer.model.feedforward import FeedForward, drops_hidden
from trainer.model.masks import Rows


@dataclass(frozen=True)
class MixedMlp(FeedForward):
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

    def run(
        self, module: Built, x_BLD: jax.Array, rows: Rows | None, deterministic: bool
    ) -> jax.Array:
        shared, parametrisation = module.shared, module.shared.parametrisation

        def project(name: str) -> jax.Array:
            axes, start = ("embed", "mlp"), parametrisation.feed_forward()
            return shared.dense(self.mlp_dim, axes, start, name, bias=self.bias)(x_BLD)

        gate = Dropout(self.sigmoid_dropout, shared.broadcast_dropout)
        hidden_BLF = gate(nn.sigmoid(project("wi_0")), deterministic) + nn.relu(project("wi_1"))
        if self.mean:
            hidden_BLF /= 2
        if self.dropout:
            hidden_BLF = shared.dropout()(hidden_BLF, deterministic)
        axes, start = ("mlp", "embed"), parametrisation.feed_forward_out()
        return shared.dense(shared.emb_dim, axes, start, "wo", bias=self.bias)(hidden_BLF)


def mixed(config: Any, options: Any) -> MixedMlp:
    """Returns the sublayer for `march.Mixed`."""
    drops, bias = drops_hidden(config), config.value("mlp_bias")
    return MixedMlp(config.mlp_dim, options.mean, options.sigmoid_dropout, drops, bias)
