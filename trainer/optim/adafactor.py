"""Adafactor as in T5X, for tensors and stacks of tensors.

optax has the same formulas but no stacks: it would factor across layers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trainer.config.optimizer import OptimizerConfig
from trainer.optim.stacked import StackAxes, no_stack, over_tensor

Tree = Any


def direction(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    """Returns Adafactor's direction, clipped by its root mean square."""
    moments = scale_by_factored_rms(
        config.value("decay_rate"),
        config.value("step_offset"),
        config.value("min_dim_size_to_factor"),
        config.value("epsilon"),
        stacked,
    )
    return [moments, clip_by_tensor_rms(config.value("clipping_threshold"), stacked)]


def scale_by_factored_rms(
    decay_rate: float = 0.8,
    step_offset: int = 0,
    min_dim_size_to_factor: int = 128,
    epsilon: float = 1e-30,
    stacked: StackAxes = no_stack,
) -> optax.GradientTransformation:
    """Divides gradients by their root mean squares, factored for large tensors.

    The state is optax's `FactoredState`: float32 `v_row` and `v_col`, the moments averaged over the
    largest and the second largest axis of a tensor, or `v` if either is shorter than
    `min_dim_size_to_factor`; unused ones have shape [1]. Stack axes stay in place.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 and 5; T5X, `adafactor.py`.
    Differences: T5X factors stacks by rules for logical axes, which ignore
    `min_dim_size_to_factor`, and single tensors by size; here both are factored by size.
    """

    def init(params: Tree) -> optax.FactoredState:
        def moments(path: tuple, param: jax.Array) -> tuple[jax.Array, ...]:
            unused = jnp.zeros((1,), jnp.float32)
            axes = _factored_axes(param.shape, stacked(path), min_dim_size_to_factor)
            if axes is None:
                return unused, unused, jnp.zeros(param.shape, jnp.float32)
            row, column = (np.delete(param.shape, axis) for axis in reversed(axes))
            return jnp.zeros(row, jnp.float32), jnp.zeros(column, jnp.float32), unused

        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        rows, columns, full = _unzip([moments(*leaf) for leaf in leaves], tree)
        return optax.FactoredState(jnp.zeros((), jnp.int32), rows, columns, full)

    def update(
        gradients: Tree, state: optax.FactoredState, params: Tree | None = None
    ) -> tuple[Tree, optax.FactoredState]:
        age = jnp.asarray(state.count - step_offset + 1, jnp.float32)
        decay = 1.0 - age ** (-decay_rate)

        def one(
            path: tuple[Any, ...], gradient: Any, row: Any, column: Any, full: Any
        ) -> tuple[jax.Array, ...]:
            gradient = gradient.astype(jnp.float32)
            square = jnp.square(gradient) + epsilon
            axes = _factored_axes(gradient.shape, stacked(path), min_dim_size_to_factor)
            if axes is None:
                full = decay * full + (1.0 - decay) * square
                return gradient * full**-0.5, row, column, full
            second, largest = axes
            row = decay * row + (1.0 - decay) * jnp.mean(square, axis=largest)
            column = decay * column + (1.0 - decay) * jnp.mean(square, axis=second)
            mean = jnp.mean(row, axis=second - (largest < second), keepdims=True)
            row_factor = jnp.expand_dims((row / mean) ** -0.5, largest)
            column_factor = jnp.expand_dims(column**-0.5, second)
            return gradient * row_factor * column_factor, row, column, full

        leaves, tree = jax.tree_util.tree_flatten_with_path(gradients)
        moments = (jax.tree.leaves(part) for part in (state.v_row, state.v_col, state.v))
        results = [
            one(path, gradient, *parts)
            for (path, gradient), *parts in zip(leaves, *moments, strict=True)
        ]
        updates, rows, columns, full = _unzip(results, tree)
        count = optax.safe_increment(state.count)
        return updates, optax.FactoredState(count, rows, columns, full)

    return optax.GradientTransformation(init, update)


def clip_by_tensor_rms(
    threshold: float, stacked: StackAxes = no_stack
) -> optax.GradientTransformation:
    """Scales each tensor's update down to a root mean square of `threshold`.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235), section 6; T5X, `adafactor.py`.
    """

    def clip(path: tuple, update: jax.Array) -> jax.Array:
        rms = jnp.sqrt(over_tensor(jnp.mean, jnp.square(update), stacked(path)))
        return update / jnp.maximum(1.0, rms / threshold)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(clip, updates))


def _factored_axes(
    shape: tuple[int, ...], stack: tuple[int, ...], min_dim_size: int
) -> tuple[int, int] | None:
    """Returns the axes (second largest, largest), or None; the later of equal axes is larger."""
    own = sorted((axis for axis in range(len(shape)) if axis not in stack), key=shape.__getitem__)
    if len(own) < 2 or shape[own[-2]] < min_dim_size:
        return None
    return own[-2], own[-1]


def _unzip(rows: list[tuple], tree: Any) -> list[Tree]:
    return [tree.unflatten(column) for column in zip(*rows, strict=True)]
