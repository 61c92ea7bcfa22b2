"""Log likelihoods of correct answers, row by row.

Dimensions: B rows of a batch, L positions, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.data.batches import pad_rows
from trainer.data.examples import rows_of
from trainer.data.features import Converter
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch, replicated, rows, tracing_on
from trainer.model.transformer import (
    Batch,
    Predictions,
    RoutedLogits,
    build_model,
    rounded_kernels,
    run_model,
)


class Likelihood:
    """Log likelihoods by a program's model; data and fsdp must divide `batch_size`."""

    def __init__(self, program: Program, converter: Converter, batch_size: int):
        self._converter, self._mesh, self._size = converter, program.mesh, batch_size
        model, spec, mesh_rules = build_model(program.spec), program.spec, program.rules
        mesh = program.mesh

        @partial(
            jax.jit,
            in_shardings=(program.model_shardings, rows(mesh)),
            out_shardings=replicated(mesh),
        )
        def likelihood(params: Any, batch: Batch) -> jax.Array:
            with tracing_on(mesh, mesh_rules):
                output = run_model(model, rounded_kernels(spec, params), batch)
            assert not isinstance(output, Predictions), "encoder-only models have no likelihood"
            logits_BLV = output.logits_BLV if isinstance(output, RoutedLogits) else output
            log_BLV = jax.nn.log_softmax(logits_BLV.astype(jnp.float32))
            target_BL = batch["decoder_target_tokens"]
            log_BL = jnp.take_along_axis(log_BLV, target_BL[..., None], axis=-1)[..., 0]
            return jnp.sum(log_BL * batch["decoder_loss_weights"], axis=-1)

        self._likelihood = likelihood

    def __call__(self, params: Any, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Returns the log likelihood of the targets of each (inputs, targets), float64 [pairs].

        Sums over tokens, in nats, EOS included if the targets have one. Sides longer than
        training's rows are cut. `params` are the model's own, as from `Program.merged`.
        """
        found = []
        for first in range(0, len(pairs), self._size):
            some = pairs[first : first + self._size]
            batch = pad_rows(rows_of(some, self._converter), self._size)
            found.append(
                np.asarray(self._likelihood(params, put_batch(batch, self._mesh)))[: len(some)]
            )
        return np.concatenate(found).astype(np.float64) if found else np.zeros(0)
