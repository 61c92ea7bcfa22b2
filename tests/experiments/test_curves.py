"""Ratios of learning curves with known answers, and intervals."""

import math

import pytest

from experiments.sweeps.curves import Curve, Spread, steps_ratio

STEPS = (100, 200, 300, 400)


def falling(factor):
    """Returns the curve of a model that learns `factor` times as fast."""
    return Curve(STEPS, tuple(10 - 0.01 * factor * step for step in STEPS))


def test_a_model_that_learns_twice_as_fast():
    base, twice = falling(1), falling(2)
    assert steps_ratio(base, base) == 1
    assert steps_ratio(base, twice) == pytest.approx(2)
    # The other way around.
    assert steps_ratio(twice, base) == pytest.approx(0.5)


def test_a_run_that_diverged_has_no_ratio():
    base, diverged = falling(1), Curve(STEPS, (9.0, 8.0, 7.0, math.nan))
    assert math.isnan(steps_ratio(base, diverged))
    assert math.isnan(steps_ratio(diverged, base))
    assert Spread.of([2.0, math.inf]).shown() == "-"
    at_once = Curve((0, 400), (5.0, 5.0))
    assert steps_ratio(base, at_once) == math.inf


def test_values_are_interpolated_linearly():
    one = Curve((10, 20, 30), (4.0, 3.0, 3.5))
    assert one.steps_to(3.25) == 17.5
    assert one.steps_to(3.0) == 20
    assert one.steps_to(5.0) == 10
    assert one.steps_to(2.9) == math.inf


def test_intervals_are_students():
    spread = Spread.of([1.0, 2.0, 3.0])
    # The quantile of two degrees of freedom is 4.303.
    assert spread.interval == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
    assert spread.deviation == 1.0
    assert spread.shown(2, sign=True) == "+2.00 ± 1.00"
    assert Spread.of([4.0]).interval is None
    assert Spread.of([4.0]).shown_interval() == "-"
