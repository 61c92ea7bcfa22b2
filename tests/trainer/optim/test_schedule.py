"""Learning rates at the steps where schedules turn, against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.config.optimizer import OPTIMIZER_PRESETS, SCHEDULE_FACTORS, OptimizerConfig
from trainer.optim.schedule import FACTORS, described, learning_rate_schedule, rise

# Of a run: a warm-up of W steps, N updates in all, the rate R at its peak.
W, N, R = 100, 1000, 0.5
COSINE = {"steps_per_cycle": N - W}
LINEAR = {"cooldown_steps": N - W}
STABLE = {"cooldown_start": 800, "cooldown_steps": 200}
TENTH = {"final_fraction": 0.1}


def half_cosine(step):
    return 0.5 * (1 + math.cos(math.pi * (step - W) / (N - W)))


def ramp(step):
    return min(1.0, step / W)


# Schedule, fields, the rate as a function of the step. Those without fields of ours are T5X's.
SCHEDULES = [
    ("constant", {}, lambda s: R),
    ("constant * linear_warmup", {}, lambda s: R * ramp(s)),
    ("constant*linear_warmup", {"warmup_start": 0.5}, lambda s: R * (0.5 + 0.5 * ramp(s))),
    ("constant * rsqrt_decay", {}, lambda s: R / math.sqrt(max(s, W))),
    ("constant * rsqrt_no_ramp_down", {}, lambda s: R / math.sqrt(max(s, W))),
    ("constant * linear_warmup * rsqrt_decay", {}, lambda s: R * ramp(s) / math.sqrt(max(s, W))),
    ("constant * rsqrt_normalized_decay", {}, lambda s: R * math.sqrt(W / max(s, W))),
    ("linear_decay", {"decay_factor": 1e-3}, lambda s: R * min(s / W, 1 + 1e-3 * (W - s))),
    (
        "constant * decay_every",
        {"decay_factor": 0.3, "steps_per_decay": W},
        lambda s: R * 0.3 ** (s // W),
    ),
    (
        "constant * linear_warmup * cosine_decay",
        COSINE,
        lambda s: R * (ramp(s) if s < W else half_cosine(s)),
    ),
    (
        "constant * linear_warmup * cosine_decay",
        {**COSINE, **TENTH},
        lambda s: R * (ramp(s) if s < W else 0.1 + 0.9 * half_cosine(s)),
    ),
    (
        "constant * linear_warmup * linear_cooldown",
        LINEAR,
        lambda s: R * (ramp(s) if s < W else (N - s) / (N - W)),
    ),
    (
        "constant * linear_warmup * linear_cooldown",
        {**STABLE, **TENTH},
        lambda s: R * (ramp(s) if s < 800 else 0.1 + 0.9 * (N - s) / 200),
    ),
    (
        "constant * linear_warmup * sqrt_cooldown",
        STABLE,
        lambda s: R * (ramp(s) if s < 800 else 1 - math.sqrt((s - 800) / 200)),
    ),
    (
        "constant * linear_warmup * polynomial_decay",
        {"decay_steps": 600, "power": 2.0, **TENTH},
        lambda s: R * (ramp(s) if s < W else 0.1 + 0.9 * max(0, 1 - (s - W) / 600) ** 2),
    ),
    (
        "constant * rsqrt_decay * linear_cooldown",
        STABLE,
        lambda s: R / math.sqrt(max(s, W)) * min(1, (N - s) / 200),
    ),
]


@pytest.mark.parametrize(("schedule", "fields", "expected"), SCHEDULES)
def test_rates_at_the_turns(schedule, fields, expected):
    config = OptimizerConfig(learning_rate=R, schedule=schedule, warmup_steps=W, **fields)
    rate = jax.jit(learning_rate_schedule(config))
    for step in (0, 1, W - 1, W, W + 1, 799, 800, 801, N - 1):
        ours = rate(step)
        assert ours.dtype == jnp.float32
        # 1 + cos and 1 - sqrt end in the difference of numbers near 1: an error of float32 in R.
        np.testing.assert_allclose(
            ours, max(1e-8, expected(step)), rtol=1e-6, atol=R * 2**-23, err_msg=str(step)
        )


def test_every_factor_is_tried():
    tried = {
        factor for schedule, *_ in SCHEDULES for factor in schedule.replace(" ", "").split("*")
    }
    assert tried == set(FACTORS) == set(SCHEDULE_FACTORS)


def test_after_the_last_update():
    """Cooldowns stay at their end; T5X's cosine begins anew; nothing falls below the least rate."""
    for schedule, fields, rates in (
        ("constant * linear_cooldown", {**LINEAR, **TENTH}, (0.05, 0.05)),
        ("constant * sqrt_cooldown", LINEAR, (1e-8, 1e-8)),
        ("constant * cosine_decay", COSINE, (0.5, 0.5 * half_cosine(W + 1))),
        ("linear_decay", {}, (1e-8, 1e-8)),
    ):
        config = OptimizerConfig(learning_rate=R, schedule=schedule, warmup_steps=W, **fields)
        rate = learning_rate_schedule(config)
        np.testing.assert_allclose([rate(N), rate(N + 1)], rates, rtol=1e-6)


def test_default_schedules():
    rates = learning_rate_schedule(OptimizerConfig())(jnp.array([0, 1, 10_000, 40_000, 1_000_000]))
    assert rates.dtype == jnp.float32
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.01, 0.005, 0.001], rtol=1e-6)
    config = OptimizerConfig(name="adamw", learning_rate=1e-3)
    rates = learning_rate_schedule(config)(jnp.array([0, 5_000, 10_000, 40_000]))
    np.testing.assert_allclose(rates, [1e-8, 5e-4, 1e-3, 5e-4], rtol=1e-6)
    rates = learning_rate_schedule(OptimizerConfig(schedule="rsqrt_no_ramp_down"))(
        jnp.array([0, 10_000, 20_000, 100_000, 524_288, 1_000_000])
    )
    np.testing.assert_allclose(rates, [0.01, 0.01, 0.0070711, 0.0031623, 0.0013811, 0.001], 1e-4)


def test_nanot5_is_pytorchs():
    """LinearLR from a half, then CosineAnnealingLR to 1e-5: their closed forms."""
    rate = learning_rate_schedule(OPTIMIZER_PRESETS["nanot5"].optimizer)
    for step, expected in (
        (0, 0.01),
        (100, 0.0101),
        (9_999, 0.02 * (0.5 + 0.5 * 9_999 / 10_000)),
        (10_000, 0.02),
        (2**16 - 1, 1e-5 + (0.02 - 1e-5) * (1 + math.cos(math.pi * 55_535 / 55_536)) / 2),
    ):
        np.testing.assert_allclose(rate(step), expected, rtol=1e-6, atol=0.02 * 2**-23)


@pytest.mark.parametrize(
    ("settings", "steps", "words"),
    [
        ({}, 60, "0.01 from update 1 to the end"),
        ({"learning_rate": 0.03}, 20_000,
         "0.0003 from update 1, falling after 10,001 to 0.000212 at update 20,000"),
        ({"schedule": "constant"}, 1, "1 from update 1 to the end"),
        ({"schedule": "constant * linear_warmup * linear_cooldown", "learning_rate": 0.001,
          "warmup_steps": 100, "cooldown_start": 80_000, "cooldown_steps": 20_000}, 100_000,
         "1e-08 from update 1, rising to 0.001, constant after 101, falling after 80,001 to 5e-08 "
         "at update 100,000"),
    ],
)  # fmt: skip
def test_rates_are_put_into_words(settings, steps, words):
    assert described(OptimizerConfig(**settings), steps) == words


COSINE_RUN = {"schedule": "constant * linear_warmup * cosine_decay", "warmup_steps": W}


def test_a_rise_is_where_a_cosine_restarts():
    config = OptimizerConfig(learning_rate=R, **COSINE_RUN, **COSINE)
    assert rise(config, N, N) is None
    assert rise(config, N, 2 * N) == N + 1  # the update at step N
    assert rise(config, 2, N) is None  # a warm-up rises, too, but from a rise
    assert rise(config, W // 2, N) is None
    assert rise(config, N - 10, N + 1) == N + 1
    assert rise(config, N + 1, 2 * N - W) is None
    for schedule in ("constant", "constant * rsqrt_decay", "constant * linear_warmup"):
        assert rise(OptimizerConfig(learning_rate=R, schedule=schedule), N, 2 * N) is None
