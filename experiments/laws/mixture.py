"""Fits losses of tasks as functions of a mixture's shares, and finds the best mixture.

Source: the search, small runs of random mixtures and a regression, is from Liu et al. 2024 (RegMix,
arXiv:2407.01492); the exponential form is from Ye et al. 2024 (arXiv:2403.16952).
"""

import dataclasses
import itertools
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
# Largest exponent: no loss has so large a one, and it does not overflow.
_LARGEST = 50


@dataclasses.dataclass(frozen=True)
class Form:
    """A law of a task's loss over shares r; float64 [constants] holds its constants."""

    scalars: tuple[str, ...]  # the first constants; the others are one per task
    vector: str  # the name of the others
    lowest: tuple[float, ...]  # bounds of the scalars and of all others
    # laws [..., constants], shares [..., tasks] -> losses [...]
    at: Callable[[np.ndarray, np.ndarray], np.ndarray]
    # law [constants], shares [runs, tasks] -> derivatives of losses [runs, constants]
    slopes: Callable[[np.ndarray, np.ndarray], np.ndarray]
    # shares [runs, tasks], losses [runs] -> laws near a minimum
    starts: Callable[[np.ndarray, np.ndarray], list[np.ndarray]]

    def mean(self, laws: np.ndarray, shares: np.ndarray) -> float:
        """Returns the mean loss of laws [laws, constants] at shares [tasks]."""
        return float(self.at(laws, shares).mean())


def _exp(values: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(values, _LARGEST))


def _exponential(laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return laws[..., 0] + _exp((laws[..., 1:] * shares).sum(axis=-1))


def _exponential_slopes(law: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(shares)), _exp(shares @ law[1:])[:, None] * shares])


def _exponential_starts(shares: np.ndarray, losses: np.ndarray) -> list[np.ndarray]:
    above = [losses - part * losses.min() for part in _STARTS]
    return [
        np.append(part * losses.min(), np.linalg.lstsq(shares, np.log(each))[0])
        for part, each in zip(_STARTS, above, strict=True)
    ]


def _power(laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
    tokens = np.log((laws[..., 2:] * shares).sum(axis=-1))
    return laws[..., 0] + _exp(-laws[..., 1] * tokens)


def _power_slopes(law: np.ndarray, shares: np.ndarray) -> np.ndarray:
    tokens = shares @ law[2:]
    above = _exp(-law[1] * np.log(tokens))
    by_a = (-law[1] * above / tokens)[:, None] * shares
    return np.column_stack([np.ones(len(shares)), -np.log(tokens) * above, by_a])


def _power_starts(shares: np.ndarray, losses: np.ndarray) -> list[np.ndarray]:
    found = []
    for part, beta in itertools.product(_STARTS, (0.3, 1.0)):
        c = part * losses.min()
        found.append(np.hstack([c, beta, optimize.nnls(shares, (losses - c) ** (-1 / beta))[0]]))
    return found


# Shares add up to 1, so a factor would be redundant in both. Source: Ye et al. 2024
# (arXiv:2403.16952) for the exponential; Kaplan et al. 2020 (arXiv:2001.08361) for the power law of
# tokens, in which a token of task j counts as a_j tokens of the target, as in Hernandez et al. 2021
# (arXiv:2102.01293).
FORMS: Mapping[str, Form] = {
    "exponential": Form(
        ("c",), "t", (0.0, -np.inf), _exponential, _exponential_slopes, _exponential_starts
    ),
    "power": Form(("c", "beta"), "a", (0.0, 0.01, 1e-6), _power, _power_slopes, _power_starts),
}


def draw(around: np.ndarray, number: int, seed: int = 0) -> np.ndarray:
    """Returns float64 [number, tasks]: random shares whose mean is nearly `around`.

    Source: RegMix draws from Dirichlet distributions around the domains' shares of the tokens.
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
    laws: np.ndarray  # float64 [laws, constants]
    left_out: np.ndarray  # float64 [runs], the losses predicted by fits to the other runs
    draws: np.ndarray  # float64 [draws, laws, constants], one fit per draw of the bootstrap
    noise: np.ndarray  # float64 [draws], a residual of the mean loss for each draw

    def at(self, shares: np.ndarray) -> tuple[float, float, float]:
        """Returns the (loss, low, high) of a run of a mixture, noise included."""
        drawn = [self.form.mean(laws, shares) for laws in self.draws] + self.noise
        low, high = np.percentile(drawn, (2.5, 97.5))
        return self.form.mean(self.laws, shares), float(low), float(high)

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
        if not self.error < _MISFIT * spread:
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
    constants = len(form.scalars) + tasks
    least = 2 * constants
    if (different := len(np.unique(shares, axis=0))) < least:
        raise UserError(
            f"{different} mixtures cannot identify a law of {tasks} tasks: give {least}"
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
    fitted = form.at(laws, shares[:, None])
    # Residuals of a fit are smaller than the noise, by the constants that it has used.
    residuals = (losses - fitted) * np.sqrt(runs / (runs - constants))
    random = np.random.default_rng(0)
    drawn = [
        refitted(every, fitted + residuals[random.integers(0, runs, runs)]) for _ in range(draws)
    ]
    noise = residuals.mean(axis=1)[random.integers(0, runs, draws)]
    means = losses.mean(axis=1)
    return MixtureFit(form, shares, means, laws, np.array(left_out), np.array(drawn), noise)


def _fitted(form: Form, shares: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Returns the constants of one task's law, the best of several starts."""
    found = [_minimum(form, start, shares, losses) for start in form.starts(shares, losses)]
    return min(found, key=lambda result: float(result.cost)).x


def _minimum(form: Form, start: np.ndarray, shares: np.ndarray, losses: np.ndarray) -> Any:
    """Returns scipy's result for one law."""
    *scalars, others = form.lowest
    lowest = np.array([*scalars, *[others] * shares.shape[1]])
    return optimize.least_squares(
        lambda law: form.at(law, shares) - losses,
        np.maximum(start, lowest + 1e-6),
        lambda law: form.slopes(law, shares),
        bounds=(lowest, np.inf),
        ftol=1e-6,
        max_nfev=100,
    )
