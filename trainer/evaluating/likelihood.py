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


class OfTargets(NamedTuple):
    """A model's judgement of each target."""

    log_BL: jax.Array  # float32, log likelihoods in nats times the targets' weights
    greedy_BL: jax.Array  # bool, True if no token is likelier, and where a target has no weight


def of_targets(program: Program) -> Callable[[Any, Batch], OfTargets]:
    """Returns the jitted (params, batch) -> `OfTargets`.

    `params` are the model's own, as returned by `Program.merged`.
    """
    model, mesh = build_model(program.spec), program.mesh

    @partial(
        jax.jit, in_shardings=(program.model_shardings, rows(mesh)), out_shardings=replicated(mesh)
    )
    def likelihoods(params: Any, batch: Batch) -> OfTargets:
        with tracing_on(mesh, program.rules):
            output = run_model(model, used_parameters(model, params, program.shares), batch)
        logits_BLV: Any = getattr(output, "logits_BLV", output)
        log_BLV, side = jax.nn.log_softmax(logits_BLV.astype(jnp.float32)), target_side(batch)
        targets_BL, weights_BL = batch[f"{side}_target_tokens"], batch[f"{side}_loss_weights"]
        log_BL = jnp.take_along_axis(log_BLV, targets_BL[..., None], axis=-1)[..., 0]
        greedy_BL = (log_BL == jnp.max(log_BLV, axis=-1)) | (weights_BL == 0)
        return OfTargets(log_BL * weights_BL, greedy_BL)

    return likelihoods


class Likelihood:
    """Log likelihoods under a program's model; data and fsdp must divide `batch_size`."""

    def __init__(self, program: Program, converter: Converter, batch_size: int):
        self._converter, self._mesh, self._size = converter, program.mesh, batch_size
        self._of_targets = of_targets(program)

    def __call__(self, params: Any, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Returns the log likelihood of each pair's targets given its inputs, float64 [pairs].

        Sums over tokens, in nats, including EOS if the targets have one. Sides longer than
        training's rows are truncated.
        """
        found = [np.zeros(0)]
        for first in range(0, len(pairs), self._size):
            found.append(self.of_tokens(params, pairs[first : first + self._size]).sum(axis=1))
        return np.concatenate(found)

    def of_tokens(
        self,
        params: Any,
        pairs: Sequence[tuple[np.ndarray, np.ndarray]],
        converter: Converter | None = None,
        size: int | None = None,
    ) -> np.ndarray:
        """Returns each target's log likelihood for at most a batch of pairs, float64 [pairs, L].

        0 on padding. By default, converter and size of the batch are the constructor's.
        """
        batch = pad_rows(rows_of(pairs, converter or self._converter), size or self._size)
        made = self._of_targets(params, put_batch(batch, self._mesh))
        return np.asarray(made.log_BL, np.float64)[: len(pairs)]
