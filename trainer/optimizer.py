"""The optimizer and its learning-rate schedule, with T5X's names and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax

from trainer.config import OptimizerConfig, factor_names

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def learning_rate_schedule(config: OptimizerConfig) -> Schedule:
    """The learning rate, a float32 scalar, as a function of the step: 0 is the first update."""
    factors = [FACTORS[name] for name in factor_names(config.schedule)]

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rate = jnp.float32(1.0)
        for factor in factors:
            rate = rate * factor(config, step)
        return jnp.maximum(rate, config.minimum_learning_rate)

    return schedule


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Adafactor with the schedule inside; the state is a plain pytree of arrays.

    The second moments of a tensor whose two largest dimensions both reach
    `min_dim_size_to_factor` are kept as `v_row` and `v_col`, of others as `v`; what a tensor does
    not use is a float32 [1]. There is no momentum and no weight decay.
    """
    return optax.adafactor(
        learning_rate=learning_rate_schedule(config),
        min_dim_size_to_factor=config.min_dim_size_to_factor,
        decay_rate=config.decay_rate,
        decay_offset=config.step_offset,
        multiply_by_parameter_scale=config.multiply_by_parameter_scale,
        clipping_threshold=config.clipping_threshold,
    )


def _constant(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """The base learning rate."""
    return jnp.float32(config.learning_rate)


def _linear_warmup(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """From 0 to 1 over `warmup_steps`."""
    return jnp.minimum(1.0, step / config.warmup_steps)


def _linear_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """The base learning rate, warmed up, then less by the share `decay_factor` each step."""
    decayed = 1.0 + config.decay_factor * (config.warmup_steps - step)
    return config.learning_rate * jnp.minimum(step / config.warmup_steps, decayed)


def _rsqrt_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """1 / sqrt(step), flat for `warmup_steps`."""
    return 1.0 / jnp.sqrt(jnp.maximum(step, config.warmup_steps))


def _rsqrt_normalized_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """`rsqrt_decay` scaled to be 1 for `warmup_steps`."""
    return jnp.sqrt(config.warmup_steps / jnp.maximum(step, config.warmup_steps))


def _decay_every(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Times `decay_factor` every `steps_per_decay`."""
    return config.decay_factor ** jnp.floor_divide(step, config.steps_per_decay)


def _cosine_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """From 1 to 0 along half a cosine over `steps_per_cycle` after warmup, then again from 1."""
    progress = jnp.maximum(0.0, (step - config.warmup_steps) / config.steps_per_cycle)
    return 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0)))


FACTORS: Mapping[str, Callable[[OptimizerConfig, jax.Array], jax.Array]] = MappingProxyType(
    {
        "constant": _constant,
        "linear_warmup": _linear_warmup,
        "linear_decay": _linear_decay,
        "rsqrt_decay": _rsqrt_decay,
        "rsqrt_normalized_decay": _rsqrt_normalized_decay,
        "decay_every": _decay_every,
        "cosine_decay": _cosine_decay,
    }
)
