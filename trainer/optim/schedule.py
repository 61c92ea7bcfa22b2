"""Learning-rate schedules: products of factors, with T5X's names and numbers."""

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.optimizer import OptimizerConfig

# Numbers of updates at which a schedule is looked at, and of parts that are put into words.
_POINTS, _PARTS = 2000, 6
# Changes below this share of the highest rate are rounding in float32.
_ROUNDING = 3e-7
_WAYS = {1: "rising", -1: "falling"}

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def learning_rate_schedule(config: OptimizerConfig) -> Schedule:
    """Returns the schedule: step (0 for the first update) -> learning rate (float32 scalar).

    A run of N steps makes its last update at step N - 1; a decay over N steps therefore reaches its
    final value just after that update.
    """
    factors = [FACTORS[name] for name in config.factors]

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rate = jnp.float32(1.0)
        for factor in factors:
            rate = rate * factor(config, step)
        return jnp.maximum(rate, config.minimum_learning_rate)

    return schedule


def described(config: OptimizerConfig, train_steps: int) -> str:
    """Returns the rates of a run's updates, such as "0.0003 from update 1, falling after 10,000".

    Turning points are exact where the schedule's own lengths put them.
    """
    own = (config.warmup_steps, config.cooldown_start, config.cooldown_steps, config.decay_steps)
    lengths = [each for each in (*own, config.steps_per_cycle, config.steps_per_decay) if each]
    sums = {first + second for first in (0, *lengths) for second in (0, *lengths)}
    near = {step + offset for step in sums for offset in (-1, 0, 1)}
    even = np.linspace(0, train_steps - 1, min(train_steps, _POINTS)).astype(int)
    steps = np.array(sorted({*even.tolist(), *(each for each in near if 0 <= each < train_steps)}))
    rates = np.broadcast_to(learning_rate_schedule(config)(steps), steps.shape).astype(float)
    changes = np.diff(rates) / max(rates.max(), np.finfo(np.float32).tiny)
    signs = np.sign(np.where(abs(changes) < _ROUNDING, 0, changes)).astype(int)
    turns = [0, *(np.flatnonzero(np.diff(signs)) + 1).tolist()] if len(signs) else []
    text = f"{rates[0]:.3g} from update 1"
    for turn, end in itertools.islice(itertools.pairwise([*turns, len(signs)]), _PARTS):
        update = f" after {steps[turn] + 1:,}" if turn else ""
        if signs[turn]:
            text += f", {_WAYS[signs[turn]]}{update} to {rates[end]:.3g}"
        elif turn:
            text += f", constant{update}"
    return f"{text} at update {train_steps:,}" if signs.any() else f"{text} to the end"


def rise(config: OptimizerConfig, begin: int, end: int) -> int | None:
    """Returns the first of the updates `begin` + 1 to `end` with over twice the rate before it.

    Only a rise after a fall counts, as where a cosine restarts; None if there is none.
    """
    if end <= begin or begin < 2:
        return None
    steps = np.arange(begin - 2, end)
    rates = np.broadcast_to(learning_rate_schedule(config)(steps), steps.shape).astype(float)
    rises = (rates[2:] > 2 * rates[1:-1]) & (rates[1:-1] <= rates[:-2])
    return begin + 1 + int(np.argmax(rises)) if rises.any() else None


def _constant(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    return jnp.float32(config.value("learning_rate"))


def _linear_warmup(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Rises linearly from `warmup_start` at step 0 to 1 over `warmup_steps`."""
    start = config.value("warmup_start")
    return start + (1.0 - start) * jnp.minimum(1.0, step / config.warmup_steps)


def _linear_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Warms up, then falls by a share `decay_factor` of the base learning rate at each step."""
    decayed = 1.0 + config.value("decay_factor") * (config.warmup_steps - step)
    return config.value("learning_rate") * jnp.minimum(step / config.warmup_steps, decayed)


def _rsqrt_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Falls as 1 / sqrt(step), constant for the first `warmup_steps`."""
    return 1.0 / jnp.sqrt(jnp.maximum(step, config.warmup_steps))


def _rsqrt_normalized_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Scales `rsqrt_decay` so that it is 1 during the first `warmup_steps`."""
    return jnp.sqrt(config.warmup_steps / jnp.maximum(step, config.warmup_steps))


def _decay_every(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    return config.value("decay_factor") ** jnp.floor_divide(step, config.value("steps_per_decay"))


def _cosine_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Falls from 1 to `final_fraction` along half a cosine of `steps_per_cycle` after the warm-up.

    It then restarts, as in T5X: at step `warmup_steps + steps_per_cycle` it is 1.
    """
    progress = jnp.maximum(0.0, (step - config.warmup_steps) / config.value("steps_per_cycle"))
    return _towards(config, 0.5 * (1.0 + jnp.cos(jnp.pi * (progress % 1.0))))


def _polynomial_decay(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Falls as (1 - progress) ** `power` to `final_fraction` and stays there.

    Progress is the share of `decay_steps` completed since the warm-up.
    Source: transformers, `get_polynomial_decay_schedule_with_warmup`; optax, `polynomial_schedule`.
    """
    progress = (step - config.warmup_steps) / config.value("decay_steps")
    return _towards(config, (1.0 - jnp.clip(progress, 0.0, 1.0)) ** config.value("power"))


def _linear_cooldown(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Stays 1 until `cooldown_start`, then falls linearly to `final_fraction` and stays there.

    After a linear warm-up, this is the linear schedule if it starts at once, and
    warm-up-stable-decay (Hu et al. 2024, arXiv:2404.06395) if later.
    """
    return _towards(config, _cooldown_left(config, step))


def _sqrt_cooldown(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Falls as 1 - sqrt(progress); otherwise like `linear_cooldown`.

    Source: Hägele et al. 2024 (arXiv:2405.18392), section 3.
    """
    return _towards(config, 1.0 - jnp.sqrt(1.0 - _cooldown_left(config, step)))


def _cooldown_left(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """Returns the remaining share of a cooldown, from 1 to 0."""
    start = config.value("cooldown_start")
    end = (config.warmup_steps if start is None else start) + config.value("cooldown_steps")
    return jnp.clip((end - step) / config.value("cooldown_steps"), 0.0, 1.0)


def _towards(config: OptimizerConfig, share: jax.Array) -> jax.Array:
    """Maps a factor that ends at 0 to one that ends at `final_fraction`."""
    final = config.value("final_fraction")
    return final + (1.0 - final) * share


FACTORS: Mapping[str, Callable[[OptimizerConfig, jax.Array], jax.Array]] = MappingProxyType(
    {
        "constant": _constant,
        "linear_warmup": _linear_warmup,
        "linear_decay": _linear_decay,
        "rsqrt_decay": _rsqrt_decay,
        "rsqrt_no_ramp_down": _rsqrt_decay,  # its name in T5's gin files
        "rsqrt_normalized_decay": _rsqrt_normalized_decay,
        "decay_every": _decay_every,
        "cosine_decay": _cosine_decay,
        "polynomial_decay": _polynomial_decay,
        "linear_cooldown": _linear_cooldown,
        "sqrt_cooldown": _sqrt_cooldown,
    }
)
