"""Optimizers, by the name in their configuration; optax's where T5X or stacked layers allow.

A tensor may be a stack: a scan over layers keeps the kernels of all layers as one array [D, layers,
F]. Whatever is taken over a tensor (root mean squares, factored moments, orthogonalisation) is then
taken over each layer's, so that scanned and unscanned models make the same updates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from trainer.config.optimizer import OptimizerConfig
from trainer.model.paths import path_name
from trainer.optim.adafactor import clip_by_tensor_rms, scale_by_factored_rms
from trainer.optim.schedule import FACTORS as FACTORS
from trainer.optim.schedule import learning_rate_schedule as learning_rate_schedule
from trainer.optim.stacked import StackAxes, no_stack, over_tensor, stack_axes

Tree = Any
Direction = Callable[[OptimizerConfig, StackAxes], list[optax.GradientTransformation]]

# The size of Adam's updates where Muon's are made as large. Source: Liu et al. 2025
# (arXiv:2502.16982), section 2.2.
_ADAM_RMS = 0.2
# Newton-Schulz steps. Source: Jordan 2024, github.com/KellerJordan/Muon.
_ORTHOGONALISATION_STEPS = 5
# What Muon leaves to Adam besides vectors: tables that are read by row, and the logits.
_NO_MATRIX = re.compile("embedding$|logits_dense/kernel$")


def make_optimizer(
    config: OptimizerConfig, logical_axes: Tree | None = None, decayed: Tree | None = None
) -> optax.GradientTransformation:
    """The optimizer with the schedule inside; its state is a plain pytree of arrays.

    Update k, from 0, has the learning rate of step k. `logical_axes` is the tree of
    `trainer.model.transformer.logical_axes`; only axes called as in `stacked.STACK_AXES` matter,
    so a model without such axes needs none. `decayed` is the tree of
    `trainer.model.transformer.decayed`, or a function from parameters to such a tree; weight decay
    follows it unless the configuration has `no_weight_decay`.

    Raises:
      ValueError: there is weight decay, and neither `decayed` nor `no_weight_decay`.

    Adafactor's second moments of a tensor whose two largest dimensions both reach
    `min_dim_size_to_factor` are kept as `v_row` and `v_col`, of others as `v`; what a tensor does
    not use is a float32 [1]. All state is float32, counts are int32 scalars.
    """
    stacked = no_stack if logical_axes is None else stack_axes(logical_axes)
    schedule = learning_rate_schedule(config)
    parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    parts += OPTIMIZERS[config.name](config, stacked)
    parts.append(optax.scale_by_schedule(schedule))
    if config.value("multiply_by_parameter_scale"):
        minimum = config.value("minimum_parameter_scale")
        maximum = config.value("maximum_parameter_scale")
        parts.append(scale_by_parameter_rms(minimum, maximum, stacked))
    if config.name == "adafactor" and config.value("beta1"):
        parts.append(optax.ema(config.value("beta1"), debias=False))
    if config.value("weight_decay"):
        decay, exponent = config.value("weight_decay"), config.value("weight_decay_rate_exponent")
        spared, mask = config.value("no_weight_decay"), decayed
        if spared is not None:
            mask = weight_decay_mask(spared)
        elif decayed is None:
            raise ValueError("weight decay needs to know which parameters the model spares")
        parts.append(
            optax.add_decayed_weights(lambda step: decay * schedule(step) ** exponent, mask)
        )
    return optax.chain(*parts, optax.scale(-1.0))


def weight_decay_mask(spared: tuple[str, ...]) -> Callable[[Tree], Tree]:
    """Returns tree -> the same tree of bools: whether weight decay applies to a tensor.

    It does unless one of the regular expressions `spared` matches somewhere in the tensor's path,
    "decoder/layers_0/mlp/wo/kernel".
    """
    patterns = [re.compile(pattern) for pattern in spared]

    def mask(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not any(pattern.search(path_name(path)) for pattern in patterns),
            params,
        )

    return mask


def scale_by_parameter_rms(
    minimum: float, maximum: float = math.inf, stacked: StackAxes = no_stack
) -> optax.GradientTransformation:
    """Multiplies the update of each tensor by its root mean square, kept in [minimum, maximum].

    Source: Shazeer and Stern 2018 (arXiv:1804.04235), section 8; T5X, `adafactor.py`.
    """

    def scale(path: tuple, update: jax.Array, param: jax.Array) -> jax.Array:
        rms = jnp.sqrt(over_tensor(jnp.mean, jnp.square(param), stacked(path)))
        return update * jnp.clip(rms, minimum, maximum)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        return jax.tree_util.tree_map_with_path(scale, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _adafactor(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    moments = scale_by_factored_rms(
        config.value("decay_rate"),
        config.value("step_offset"),
        config.value("min_dim_size_to_factor"),
        config.value("epsilon"),
        stacked,
    )
    threshold = config.value("clipping_threshold")
    return [moments, clip_by_tensor_rms(threshold, stacked)]


def _adam(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    beta1, beta2 = config.value("beta1"), config.value("beta2")
    return [optax.scale_by_adam(beta1, beta2, config.value("epsilon"))]


def _lion(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    return [optax.scale_by_lion(config.value("beta1"), config.value("beta2"))]


def _muon(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    """Orthogonalised momentum for matrices, Adam for the rest, both of Adam's size.

    Source: Jordan 2024, github.com/KellerJordan/Muon; Liu et al. 2025 (arXiv:2502.16982).
    """

    def matrix(path: tuple, tensor: jax.Array) -> contrib.MuonDimensionNumbers | None:
        own = [axis for axis in range(tensor.ndim) if axis not in stacked(path)]
        if len(own) != 2 or _NO_MATRIX.search(path_name(path)):
            return None
        return contrib.MuonDimensionNumbers((own[0],), (own[1],))

    def matrices(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(matrix, params)

    def resize(path: tuple, update: jax.Array) -> jax.Array:
        dimensions = matrix(path, update)
        assert dimensions is not None
        (rows,), (columns,) = dimensions
        return update * _ADAM_RMS * math.sqrt(max(update.shape[rows], update.shape[columns]))

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, tensor: "adam" if matrix(path, tensor) is None else "muon", params
        )

    muon = optax.chain(
        contrib.scale_by_muon(
            ns_steps=_ORTHOGONALISATION_STEPS,
            beta=config.value("momentum"),
            weight_dimension_numbers=matrices,
        ),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(resize, updates)),
    )
    adam = optax.chain(*_adam(config, stacked))
    return [optax.partition({"muon": muon, "adam": adam}, labels)]


OPTIMIZERS: Mapping[str, Direction] = MappingProxyType(
    {
        "adafactor": _adafactor,
        "adamw": _adam,
        "adamw_rms": _adam,
        "lion": _lion,
        "muon": _muon,
    }
)
