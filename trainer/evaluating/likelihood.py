"""Log likelihoods of correct answers, row by row.

Dimensions: B rows of a batch, L positions, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.data.batches import pad_rows
from trainer.data.examples import rows_of
from trainer.data.features import Converter, target_side
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch, replicated, rows, tracing_on
from trainer.engine.step import used_parameters
from trainer.model.transformer import Batch, build_model, run_model


class OfRows(NamedTuple):
    """What a model says of the targets of each row."""

    log_B: jax.Array  # float32, log likelihoods in nats
    weights_B: jax.Array  # float32, sums of the targets' weights
    greedy_B: jax.Array  # bool, True if every weighted target is the most likely token


def of_rows(program: Program) -> Callable[[Any, Batch], OfRows]:
    """Returns the jitted (params, batch) -> `OfRows`.

    `params` are the model's own, as returned by `Program.merged`.
    """
    model, mesh = build_model(program.spec), program.mesh

    @partial(
        jax.jit, in_shardings=(program.model_shardings, rows(mesh)), out_shardings=replicated(mesh)
    )
    def likelihoods(params: Any, batch: Batch) -> OfRows:
        with tracing_on(mesh, program.rules):
            output = run_model(model, used_parameters(model, params, program.shares), batch)
        logits_BLV: Any = getattr(output, "logits_BLV", output)
        log_BLV, side = jax.nn.log_softmax(logits_BLV.astype(jnp.float32)), target_side(batch)
        targets_BL, weights_BL = batch[f"{side}_target_tokens"], batch[f"{side}_loss_weights"]
        log_BL = jnp.take_along_axis(log_BLV, targets_BL[..., None], axis=-1)[..., 0]
        weights_B = jnp.sum(weights_BL, axis=-1).astype(jnp.float32)
        right_BL = (jnp.argmax(log_BLV, axis=-1) == targets_BL) | (weights_BL == 0)
        return OfRows(jnp.sum(log_BL * weights_BL, axis=-1), weights_B, jnp.all(right_BL, axis=-1))

    return likelihoods


class Likelihood:
    """Log likelihoods under a program's model; data and fsdp must divide `batch_size`."""

    def __init__(self, program: Program, converter: Converter, batch_size: int):
        self._converter, self._mesh, self._size = converter, program.mesh, batch_size
        self._of_rows = of_rows(program)

    def __call__(self, params: Any, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Returns the log likelihood of each pair's targets given its inputs, float64 [pairs].

        Sums over tokens, in nats, including EOS if the targets have one. Sides longer than
        training's rows are truncated.
        """
        found = [np.zeros(0)]
        for first in range(0, len(pairs), self._size):
            some = pairs[first : first + self._size]
            batch = pad_rows(rows_of(some, self._converter), self._size)
            made = self._of_rows(params, put_batch(batch, self._mesh))
            found.append(np.asarray(made.log_B, np.float64)[: len(some)])
        return np.concatenate(found)
