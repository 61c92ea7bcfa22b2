"""Root mean squares of parameters, gradients and updates per layer."""

import itertools
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.engine.compiled_programs import options
from trainer.engine.sharding import replicated, rows
from trainer.engine.step import Batch, Parts, TrainState, make_update
from trainer.model.layers import unstack_layers
from trainer.model.paths import named
from trainer.optim.stacked import over_tensor, stack_axes

# Source: T5X, `trainer.WeightMetricsComputer`.
NAMES = ("weight_rms", "weight_gradient_rms", "weight_update_rms")


class Norms:
    """Computes an update's norms in a separate program, so as not to alter the step's results.

    Takes about as long as an update.
    """

    def __init__(self, parts: Parts, axes: Any, shapes: Any):
        tuning, mesh = parts.tuning, parts.mesh
        self._added = tuning.added
        self._shapes, self._stack = tuning.learned(shapes), stack_axes(axes)
        update, shardings = make_update(parts), (parts.shardings, rows(mesh))

        @partial(
            jax.jit,
            in_shardings=shardings,
            out_shardings=replicated(mesh),
            compiler_options=options(mesh, parts.config.compiler_options),
        )
        def norms(state: TrainState, batch: Batch) -> jax.Array:
            after, gradients, updates = update(state, batch)
            trees = (tuning.learned(after.params), gradients, updates)
            leaves = (jax.tree.leaves(self._by_layer(tree)) for tree in trees)
            return jnp.stack([jnp.concatenate([leaf.ravel() for leaf in each]) for each in leaves])

        self._norms = norms

    def __call__(self, state: TrainState, batch: Batch) -> jax.Array:
        """Returns the update's norms, float32 [3, N], one row for each of NAMES."""
        return self._norms(state, batch)

    def by_name(self, norms: jax.Array) -> dict[str, float]:
        """Returns the norms by name, such as "weight_rms/decoder/layers_0/mlp/wo/kernel".

        A scanned model has the names of the unscanned one.
        """
        values = np.asarray(norms)
        return {
            f"{kind}/{name}": float(row[place])
            for kind, row in zip(NAMES, values, strict=True)
            for name, place in self._places.items()
        }

    @cached_property
    def _places(self) -> dict[str, int]:
        count = itertools.count()
        tree = jax.tree.map(
            lambda leaf: np.fromiter(count, np.int64, leaf.size).reshape(leaf.shape),
            jax.eval_shape(self._by_layer, self._shapes),
        )
        added = {name: unstack_layers(tree[name]) for name in tree if name == self._added}
        by_layer = named({**unstack_layers(tree), **added})
        return {name: int(np.asarray(place).item()) for name, place in by_layer.items()}

    def _by_layer(self, tree: Any) -> Any:
        """Returns the root mean square of each layer's tensors; reduced axes keep size 1."""
        return jax.tree_util.tree_map_with_path(
            lambda path, x: jnp.sqrt(
                over_tensor(jnp.mean, jnp.square(x.astype(jnp.float32)), self._stack(path))
            ),
            tree,
        )
