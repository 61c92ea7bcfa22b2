"""Fits losses of tasks as functions of a mixture's shares, and finds the best mixture.

Source: the search, small runs of random mixtures and a regression, is from Liu et al. 2024 (RegMix,
arXiv:2407.01492); the exponential form is from Ye et al. 2024 (arXiv:2403.16952).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy import optimize, stats

from tasks.terminal.command_line import UserError

# Smallest share of a drawn mixture: a task with a rate of 0 would not be evaluated.
_SMALLEST = 0.01
# Starts of c, as shares of the lowest loss.
_STARTS = (0.0, 0.5, 0.9)
# Largest error accepted of mixtures left out, relative to the losses' standard deviation, which is
# the error of a law that knows only their mean.
_MISFIT = 0.5
# Largest exponent, above that of any loss and below overflow.
_LARGEST = 50


@dataclasses.dataclass(frozen=True)
class Form:
    """A law of a task's loss: c + link(Σ t_j f(r_j)), with shares r."""

    f: Callable[[np.ndarray], np.ndarray]
    link: Callable[[np.ndarray], np.ndarray]
    slope: Callable[[np.ndarray], np.ndarray]  # the link's derivative
    inverse: Callable[[np.ndarray], np.ndarray]  # the link's inverse

    def at(self, laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Returns the losses [..., laws] of laws [laws, 1 + tasks] at shares [..., tasks]."""
        return laws[:, 0] + self.link(self.f(shares) @ laws[:, 1:].T)

    def mean(self, laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
        """Returns the mean loss [...] of laws at shares [..., tasks]."""
        return self.at(laws, shares).mean(axis=-1)


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _exp(values: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(values, _LARGEST))


# Shares add up to 1, so a factor of the exponential would be redundant.
FORMS: Mapping[str, Form] = {
    "exponential": Form(_same, _exp, _exp, np.log),
    "logarithmic": Form(np.log, _same, np.ones_like, _same),
}


def draw(around: np.ndarray, number: int, seed: int = 0) -> np.ndarray:
    """Returns float64 [number, tasks]: random shares whose mean is nearly `around`.

    Source: RegMix, section 3.1, draws from Dirichlet distributions around the domains' shares.
      Differences: one concentration, the number of tasks, which makes draws around equal shares
      uniform.
    """
    random = np.random.default_rng(seed)
    drawn = random.dirichlet(around.size * around / around.sum(), number)
    drawn = np.maximum(drawn, _SMALLEST)
    return drawn / drawn.sum(axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class MixtureFit:
    """Laws of several tasks' losses; the loss of a mixture is their mean."""

    form: Form
    shares: np.ndarray  # float64 [runs, tasks], of the runs
    losses: np.ndarray  # float64 [runs], means over the fitted tasks
    laws: np.ndarray  # float64 [laws, 1 + tasks]: c and t
    left_out: np.ndarray  # float64 [runs], the losses predicted by fits to the other runs
    draws: np.ndarray  # float64 [draws, laws, 1 + tasks], one fit per draw of the bootstrap
    noise: np.ndarray  # float64 [draws], a residual of the mean loss for each draw

    def at(self, shares: np.ndarray) -> tuple[float, float, float]:
        """Returns the (loss, low, high) of a run of a mixture, noise included."""
        drawn = [self.form.mean(laws, shares) for laws in self.draws] + self.noise
        low, high = np.percentile(drawn, (2.5, 97.5))
        return float(self.form.mean(self.laws, shares)), float(low), float(high)

    @property
    def error(self) -> float:
        """The root mean square error of runs left out."""
        return float(np.sqrt(np.mean((self.left_out - self.losses) ** 2)))

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of the runs' losses with their predictions when left out."""
        return float(stats.spearmanr(self.left_out, self.losses).statistic)

    def best(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (shares, low, high), float64 [tasks] each, of the mixture with the lowest loss.

        No share is outside its range in the runs, since the law is not known there.
        """
        low, high = np.percentile([self._lowest(laws) for laws in self.draws], (2.5, 97.5), axis=0)
        return self._lowest(self.laws), low, high

    def _lowest(self, laws: np.ndarray) -> np.ndarray:
        found = optimize.minimize(
            lambda shares: self.form.mean(laws, shares),
            self.shares.mean(axis=0),
            bounds=np.column_stack([self.shares.min(axis=0), self.shares.max(axis=0)]),
            constraints={"type": "eq", "fun": lambda shares: shares.sum() - 1},
            method="SLSQP",
        )
        return found.x

    @property
    def refusal(self) -> str:
        """Returns the reason why the runs do not identify the law; "" if they do."""
        spread = float(np.std(self.losses))
        if not self.error <= _MISFIT * spread:
            return (
                f"the runs do not identify the law: it misses a mixture left out by "
                f"{self.error:.4f}, but their standard deviation is {spread:.4f}, and more than "
                f"{_MISFIT:.0%} of it is refused; add mixtures, or train longer"
            )
        return ""


def fit(form: Form, shares: np.ndarray, losses: np.ndarray, draws: int = 200) -> MixtureFit:
    """Fits losses [runs, laws] to shares [runs, tasks], with a bootstrap of residuals.

    Raises UserError if there are too few mixtures, or shares that depend on each other.
    """
    runs, tasks = shares.shape
    least = 2 * (tasks + 1)
    if len(np.unique(shares, axis=0)) < least:
        raise UserError(
            f"{len(np.unique(shares, axis=0))} mixtures cannot identify a law of {tasks} tasks: "
            f"give {least}"
        )
    if np.linalg.matrix_rank(shares, tol=1e-3 * runs) < tasks:
        raise UserError("shares of the mixtures depend on each other: draw them at random")
    laws = np.array([_fitted(form, shares, column) for column in losses.T])

    def refitted(kept: np.ndarray, values: np.ndarray) -> np.ndarray:
        columns = zip(laws, values.T, strict=True)
        return np.array([_minimum(form, law, shares[kept], each).x for law, each in columns])

    every = np.arange(runs)
    rest = [every != run for run in every]
    left_out = [
        form.mean(refitted(kept, losses[kept]), shares[run]) for run, kept in enumerate(rest)
    ]
    fitted = form.at(laws, shares)
    # Residuals of a fit are smaller than the noise, by the constants that it has used.
    residuals = (losses - fitted) * np.sqrt(runs / (runs - tasks - 1))
    random = np.random.default_rng(0)
    drawn = [
        refitted(every, fitted + residuals[random.integers(0, runs, runs)]) for _ in range(draws)
    ]
    noise = residuals.mean(axis=1)[random.integers(0, runs, draws)]
    means = losses.mean(axis=1)
    return MixtureFit(form, shares, means, laws, np.array(left_out), np.array(drawn), noise)


def _fitted(form: Form, shares: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Returns c and t of one task's law, the best of several starts."""
    found = []
    for part in _STARTS:
        c = part * losses.min()
        t = np.linalg.lstsq(form.f(shares), form.inverse(losses - c))[0]
        found.append(_minimum(form, np.append(c, t), shares, losses))
    return min(found, key=lambda result: float(result.cost)).x


def _minimum(form: Form, start: np.ndarray, shares: np.ndarray, losses: np.ndarray) -> Any:
    """Returns scipy's result for one law; no loss is below 0, nor is c."""
    lowest = np.append(0.0, np.full(len(start) - 1, -np.inf))
    f, ones = form.f(shares), np.ones((len(shares), 1))
    return optimize.least_squares(
        lambda law: law[0] + form.link(f @ law[1:]) - losses,
        np.maximum(start, lowest + 1e-6),
        lambda law: np.hstack([ones, form.slope(f @ law[1:])[:, None] * f]),
        bounds=(lowest, np.inf),
        max_nfev=200,
    )
