"""Makes a configuration's optimizer, from optax's parts except for T5X and stacked layers.

A tensor may be a stack: a scan over layers keeps all layers' kernels as one array [D, layers, F].
Reductions (root mean squares, factored moments, orthogonalisation) are per layer, so that scanned
and unscanned models make the same updates.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trainer.config.optimizer import OPTIMIZERS, OptimizerConfig
from trainer.model.parameters import ParameterFacts
from trainer.model.parametrisation import UNCHANGED
from trainer.model.paths import path_name
from trainer.model.slot import load
from trainer.model.spec import EncoderSpec, ModelSpec
from trainer.model.transformer import decayed, logical_axes, parameter_tree
from trainer.optim.plateau import droppable
from trainer.optim.schedule import Schedule
from trainer.optim.schedule import learning_rate_schedule as learning_rate_schedule
from trainer.optim.stacked import StackAxes, no_stack, over_tensor, stack_axes

Tree = Any
# An optimizer's transformations from gradients to a direction; learning rate, parameter scale and
# weight decay follow and are common to all.
Direction = Callable[[OptimizerConfig, StackAxes], list[optax.GradientTransformation]]


def make_optimizer(
    config: OptimizerConfig,
    logical_axes: Tree | None = None,
    decayed: Tree | None = None,
    facts: Tree | None = None,
    drops: bool = False,
) -> optax.GradientTransformation:
    """Returns the optimizer, with its schedule; its state is a plain pytree of arrays.

    Update k, counted from 0, uses step k's learning rate. `logical_axes`, `decayed` and `facts`
    are trees of `trainer.model.transformer` (`logical_axes`, `decayed`, `parameter_tree`). Without
    axes in `stacked.STACK_AXES`, `logical_axes` may be None. `decayed` may also be a function
    from parameters to its tree; weight decay follows it unless the configuration has
    `no_weight_decay` (ValueError if both are missing). `facts` give muP's rates per tensor, None a
    common rate. With `drops`, `trainer.optim.plateau.set_rate_scale` can lower the schedule.

    State is float32, counts are int32 scalars; for Adafactor's second moments see
    `trainer.optim.adafactor.scale_by_factored_rms`.
    """
    stacked = no_stack if logical_axes is None else stack_axes(logical_axes)
    schedule = learning_rate_schedule(config)
    parts = [] if config.clip_norm is None else [optax.clip_by_global_norm(config.clip_norm)]
    if config.clip_value is not None:
        parts.insert(0, optax.clip(config.clip_value))
    factors = _factors(config, facts, stacked)
    if config.value("scale_epsilon") and factors:
        # Adam with gradients / r and epsilon is Adam with gradients and epsilon * r.
        parts.append(_scale_tensors({path: 1.0 / factor.rate for path, factor in factors.items()}))
    direction: Direction = load(OPTIMIZERS[config.name].code)
    parts += direction(config, stacked)

    def by_schedule(make: Callable[[Schedule], optax.GradientTransformation]) -> None:
        parts.append(droppable(make, schedule) if drops else make(schedule))

    by_schedule(optax.scale_by_schedule)
    if config.value("multiply_by_parameter_scale"):
        minimum = config.value("minimum_parameter_scale")
        maximum = config.value("maximum_parameter_scale")
        parts.append(scale_by_parameter_rms(minimum, maximum, stacked))
    if OPTIMIZERS[config.name].averages_updates and config.value("beta1"):
        parts.append(optax.ema(config.value("beta1"), debias=False))
    # Decay scales with a tensor's rate by the same exponent as with the learning rate.
    shared = 0.0
    if config.value("weight_decay") and not config.value("independent_weight_decay"):
        shared = config.value("weight_decay_rate_exponent")
    if factors and shared != 1:
        own = {path: factor.update ** (1 - shared) for path, factor in factors.items()}
        parts.append(_scale_tensors(own))
    if config.value("weight_decay"):
        decay, exponent = config.value("weight_decay"), config.value("weight_decay_rate_exponent")
        peak = 1.0
        if config.value("independent_weight_decay"):  # a schedule may have no constant factor
            peak = config.value("learning_rate") or 1.0
        spared, mask = config.value("no_weight_decay"), decayed
        if spared is not None:
            mask = weight_decay_mask(spared)
        elif decayed is None:
            raise ValueError("weight decay needs to know which parameters the model exempts")
        by_schedule(
            lambda rate: optax.add_decayed_weights(
                lambda step: decay * (rate(step) / peak) ** exponent, mask
            )
        )
    if factors and shared:
        parts.append(_scale_tensors({path: f.update**shared for path, f in factors.items()}))
    return optax.chain(*parts, optax.scale(-1.0))


def in_places(chain: tuple[Any, ...], states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the `states` of one chain in the order of another, whose states are `chain`.

    The two differ in parts without arrays, such as clipping, which have places nevertheless. If
    they do not have equally many states with arrays, `states` is returned as it is.
    """
    filled = [state for state in states if jax.tree.leaves(state)]
    places = [bool(jax.tree.leaves(state)) for state in chain]
    if sum(places) != len(filled):
        return states
    left = iter(filled)
    return tuple(next(left) if full else own for own, full in zip(chain, places, strict=True))


def optimizer_of(
    config: OptimizerConfig, spec: ModelSpec | EncoderSpec
) -> optax.GradientTransformation:
    """Returns the optimizer of a model without fixed parameters; see `make_optimizer`."""
    return make_optimizer(config, logical_axes(spec), decayed(spec), parameter_tree(spec))


class _Factor(NamedTuple):
    """Factors of a tensor's learning rate, and of its updates in the run's optimizer."""

    rate: float
    update: float


def _factors(config: OptimizerConfig, facts: Tree | None, stacked: StackAxes) -> dict[str, _Factor]:
    """Returns each tensor's factors by path; {} if all tensors share one rate."""
    leaves = jax.tree_util.tree_leaves_with_path(facts)
    if all(leaf.rates == UNCHANGED for _, leaf in leaves):
        return {}
    code = OPTIMIZERS[config.name].rate_exponent
    scaled = config.value("multiply_by_parameter_scale")

    def factor(path: tuple, leaf: ParameterFacts) -> _Factor:
        own_axes = len(leaf.shape) - len(stacked(path))
        exponent = 1.0 if code is None else load(code)(path_name(path), own_axes)
        rate, size = leaf.rates
        return _Factor(rate, rate**exponent / (size if scaled else 1.0))

    return {path_name(path): factor(path, leaf) for path, leaf in leaves}


def _scale_tensors(factors: dict[str, float]) -> optax.GradientTransformation:
    def scale(path: tuple, update: jax.Array) -> jax.Array:
        return update * factors[path_name(path)]

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(scale, updates))


def weight_decay_mask(excluded: tuple[str, ...]) -> Callable[[Tree], Tree]:
    """Returns (tree -> tree of bools): True unless a regular expression matches the path."""
    patterns = [re.compile(pattern) for pattern in excluded]

    def decays(path: tuple, _: Any) -> bool:
        return not any(pattern.search(path_name(path)) for pattern in patterns)

    return lambda params: jax.tree_util.tree_map_with_path(decays, params)


def scale_by_parameter_rms(
    minimum: float, maximum: float = math.inf, stacked: StackAxes = no_stack
) -> optax.GradientTransformation:
    """Multiplies each tensor's update by the tensor's RMS, clipped to [minimum, maximum].

    Source: Shazeer and Stern 2018 (arXiv:1804.04235), section 8; T5X, `adafactor.py`.
    """

    def scale(path: tuple, update: jax.Array, param: jax.Array) -> jax.Array:
        rms = jnp.sqrt(over_tensor(jnp.mean, jnp.square(param), stacked(path)))
        return update * jnp.clip(rms, minimum, maximum)

    return optax.stateless(
        lambda updates, params: jax.tree_util.tree_map_with_path(scale, updates, params)
    )
