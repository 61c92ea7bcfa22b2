"""Fits one run's loss over its steps: L(t) = a t^-b + c."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import optimize

from tasks.terminal.command_line import UserError

# Source: MARCH's fit, `least_squares(loss="soft_l1", x0=(10, 0.5, 2))`.
_START = (10.0, 0.5, 2.0)
# Consecutive losses depend on each other, so blocks of losses are drawn.
_BLOCKS = 50
_LEAST_POINTS = 20
# More than any loss, and small enough for sums of squares.
_LARGEST = 1e100
# A fit that needs more evaluations follows a valley, so its window identifies nothing.
_EVALUATIONS = 200
# A window with a wider interval of c, in nats, says nothing about the limit.
WIDEST = 0.2
# Parts of the window, each with the same ratio of steps, whose mean residuals test the fit.
_PARTS = 8
# Largest accepted root mean square of these means, relative to the loss's fall in the window.
_MISFIT = 0.05


@dataclasses.dataclass(frozen=True)
class CurveFit:
    """A fit of a t^-b + c; t in updates, c in the loss's unit."""

    a: float
    b: float
    c: float
    draws: np.ndarray  # float64 [draws, 3], the constants of each draw of the bootstrap
    first: int  # the window's first and last step
    last: int
    # Root mean square of the parts' mean residuals, beyond what noise explains, relative to the
    # fit's fall within the window.
    misfit: float

    def at(self, step: float) -> float:
        """Returns the fitted loss at a step."""
        return self.a * step**-self.b + self.c

    def interval(self, values: np.ndarray) -> tuple[float, float]:
        """Returns the 2.5th and 97.5th percentiles of `values`, one per draw."""
        low, high = np.percentile(values, (2.5, 97.5))
        return float(low), float(high)

    def interval_at(self, step: float) -> tuple[float, float]:
        """Returns the interval of the loss at a step."""
        a, b, c = self.draws.T
        return self.interval(a * step**-b + c)

    @property
    def refusal(self) -> str:
        """Returns the reason why the window does not identify the curve; "" if it does."""
        low, high = self.interval(self.draws[:, 2])
        window = f"the window of steps {self.first:,} to {self.last:,}"
        if self.a <= 0 or self.interval(self.draws[:, 1])[0] <= 0:
            return f"{window} has a loss that does not fall, or may even rise: use another --window"
        if self.misfit > _MISFIT:
            return (
                f"{window} is not one power law: the means of its parts miss the best fit by "
                f"{self.misfit:.0%} of the loss's fall; begin later (--window)"
            )
        if high - low > WIDEST:
            return (
                f"{window} does not identify the exponent: c is anywhere from {low:.2f} to "
                f"{high:.2f} (95%), an interval wider than {WIDEST}; begin earlier (--window) or "
                "train longer"
            )
        if self.c < 0 or low < 0:
            return (
                f"{window} gives a loss of {min(self.c, low):.2f} in the limit, which no loss has: "
                "begin earlier (--window) or train longer"
            )
        return ""


def fit(steps: Sequence[int], losses: Sequence[float], draws: int = 200, seed: int = 0) -> CurveFit:
    """Fits losses over ascending steps from 1, with a bootstrap over blocks of consecutive losses.

    Residuals are weighted by soft_l1, which discounts outliers.
    """
    t, y = np.asarray(steps, float), np.asarray(losses, float)
    if len(t) < _LEAST_POINTS:
        raise UserError(
            f"the window has {len(t)} losses, but {_LEAST_POINTS} are needed: begin earlier "
            "(--window), or set --metrics.every_steps lower"
        )
    if not (np.abs(y) < _LARGEST).all():
        raise UserError(
            f"the window has losses that are not finite or above {_LARGEST:g}: choose a different "
            "--window"
        )
    best = _fitted(t, y, _START)
    a, b, c = best
    law = a * t**-b + c
    residuals = y - law
    random = np.random.default_rng(seed)
    block = max(1, len(t) // _BLOCKS)
    found = [_fitted(t, law + _drawn(random, residuals, block), best) for _ in range(draws)]
    return CurveFit(
        float(a), float(b), float(c), np.array(found), int(t[0]), int(t[-1]),
        _misfit(t, residuals, a * t[0] ** -b - a * t[-1] ** -b),
    )  # fmt: skip


def _drawn(random: np.random.Generator, residuals: np.ndarray, block: int) -> np.ndarray:
    """Returns a resample of `residuals`, equally long, made of blocks that wrap around."""
    count = len(residuals)
    starts = random.integers(0, count, -(-count // block))
    return residuals[(starts[:, None] + np.arange(block)).ravel()[:count] % count]


def _fitted(t: np.ndarray, y: np.ndarray, start: Iterable[float]) -> np.ndarray:
    log = np.log(t)
    # The scale of `a` varies with `b` by orders of magnitude, so fit it at the window's middle.
    middle = float(log.mean())

    def residuals(p: np.ndarray) -> np.ndarray:
        return p[0] * np.exp(-p[1] * (log - middle)) + p[2] - y

    def jacobian(p: np.ndarray) -> np.ndarray:
        power = np.exp(-p[1] * (log - middle))
        return np.stack([power, -p[0] * (log - middle) * power, np.ones_like(power)], 1)

    a, b, c = start
    begin = (a * np.exp(-b * middle), b, c)
    result = optimize.least_squares(
        residuals, begin, jac=jacobian, loss="soft_l1", x_scale="jac", max_nfev=_EVALUATIONS
    )
    scaled, b, c = result.x
    return np.array([scaled * np.exp(b * middle), b, c])


def _misfit(t: np.ndarray, residuals: np.ndarray, fall: float) -> float:
    edges = np.geomspace(t[0], t[-1], _PARTS + 1)[1:-1]
    parts = [part for part in np.split(residuals, np.searchsorted(t, edges)) if len(part)]
    # Neighbours differ only by noise, whatever the law misses.
    noise = np.var(np.diff(residuals)) / 2
    beyond = np.mean([part.mean() ** 2 - noise / len(part) for part in parts])
    return float(np.sqrt(max(beyond, 0.0)) / max(abs(fall), 1e-12))
