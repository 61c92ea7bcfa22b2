"""The optimizer and its learning-rate schedule, with T5X's names and numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
import optax

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


@dataclass(frozen=True)
class OptimizerConfig:
    """Adafactor and its schedule.

    `learning_rate` is T5X's `base_learning_rate`; with `multiply_by_parameter_scale` it is
    relative to each tensor's root mean square. `schedule` is a product of the factors in
    `FACTORS`, written "constant * linear_warmup * rsqrt_decay"; "constant * rsqrt_decay", the
    default, has no ramp: it is flat at `learning_rate / sqrt(warmup_steps)` for `warmup_steps`.

    `decay_rate`, `step_offset`, `clipping_threshold`, `min_dim_size_to_factor` are Adafactor's;
    `decay_factor`, `steps_per_decay` (steps) and `steps_per_cycle` (steps) serve the factors
    that name them. The schedule never gives less than `minimum_learning_rate`.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235); google-research/t5x, `adafactor.py` and
    `utils.create_learning_rate_scheduler`, whose defaults these are, but for the learning rate
    and the schedule, which are those of its pretraining runs (`configs/runs/pretrain.gin`).

    Raises:
        ValueError: at construction, naming the field or the factor, if a value makes no sense.
    """

    name: str = "adafactor"
    learning_rate: float = 1.0
    schedule: str = "constant * rsqrt_decay"
    warmup_steps: int = 10_000
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float = 1.0
    min_dim_size_to_factor: int = 128
    multiply_by_parameter_scale: bool = True
    decay_factor: float = 0.5
    steps_per_decay: int = 20_000
    steps_per_cycle: int = 100_000
    minimum_learning_rate: float = 1e-8

    def __post_init__(self) -> None:
        if self.name != "adafactor":
            raise ValueError(f"OptimizerConfig.name is {self.name!r}; it must be 'adafactor'")
        for factor in _factor_names(self.schedule):
            if factor not in FACTORS:
                raise ValueError(
                    f"OptimizerConfig.schedule {self.schedule!r} has the unknown factor "
                    f"{factor!r}; known are {', '.join(sorted(FACTORS))}, joined by '*'"
                )
        for name in ("warmup_steps", "steps_per_decay", "steps_per_cycle"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"OptimizerConfig.{name} is {getattr(self, name)}; it must be 1 or more"
                )
        if self.clipping_threshold < 1:
            raise ValueError(
                f"OptimizerConfig.clipping_threshold is {self.clipping_threshold}; "
                "it must be 1 or more"
            )


def learning_rate_schedule(config: OptimizerConfig) -> Schedule:
    """The learning rate, a float32 scalar, as a function of the step: 0 is the first update."""
    factors = [FACTORS[name] for name in _factor_names(config.schedule)]

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


def _factor_names(schedule: str) -> list[str]:
    return [name.strip() for name in schedule.split("*")]


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
