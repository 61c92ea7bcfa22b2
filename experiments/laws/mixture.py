"""Fits losses of tasks as functions of a mixture's shares, and finds the best mixture.

The law of each task is c + exp(Σ t_j r_j) with shares r; their sum of 1 makes a factor of the
exponential redundant. Source: Ye et al. 2024 (arXiv:2403.16952), equation 6. The search, small
runs of random mixtures and a regression, is that of Liu et al. 2024 (RegMix, arXiv:2407.01492).
"""

import dataclasses

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
_DRAWS = 200


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

    shares: np.ndarray  # float64 [runs, tasks], of the runs
    losses: np.ndarray  # float64 [runs], means over the fitted tasks
    laws: np.ndarray  # float64 [laws, 1 + tasks]: c and t
    draws: np.ndarray  # float64 [draws, laws, 1 + tasks], one fit per draw of the bootstrap
    left_out: np.ndarray  # float64 [runs], the losses predicted by fits to the other runs
    noise: np.ndarray  # float64 [draws], a residual of the mean loss for each draw

    def at(self, shares: np.ndarray) -> tuple[float, float, float]:
        """Returns the (loss, low, high) of a run of a mixture, noise included."""
        drawn = [_loss(laws, shares) for laws in self.draws] + self.noise
        low, high = np.percentile(drawn, (2.5, 97.5))
        return float(_loss(self.laws, shares)), float(low), float(high)

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
        low, high = np.percentile(
            [_lowest(laws, self.shares) for laws in self.draws], (2.5, 97.5), axis=0
        )
        return _lowest(self.laws, self.shares), low, high

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


def fit(shares: np.ndarray, losses: np.ndarray, seed: int = 0) -> MixtureFit:
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
    laws = np.array([_fitted(shares, column) for column in losses.T])
    fitted = _at(laws, shares)
    # Residuals of a fit are smaller than the noise, by the constants that it has used.
    residuals = (losses - fitted) * np.sqrt(runs / (runs - tasks - 1))
    random = np.random.default_rng(seed)
    draws = np.array(
        [
            _refitted(laws, shares, fitted + residuals[random.integers(0, runs, runs)])
            for _ in range(_DRAWS)
        ]
    )
    rest = [np.arange(runs) != run for run in range(runs)]
    left_out = [
        _loss(_refitted(laws, shares[kept], losses[kept]), shares[run])
        for run, kept in enumerate(rest)
    ]
    noise = residuals.mean(axis=1)[random.integers(0, runs, _DRAWS)]
    return MixtureFit(shares, losses.mean(axis=1), laws, draws, np.array(left_out), noise)


def _at(laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Returns the loss of each law, [..., laws], at shares [..., tasks]."""
    return laws[:, 0] + np.exp(shares @ laws[:, 1:].T)


def _loss(laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
    return _at(laws, shares).mean(axis=-1)


def _refitted(laws: np.ndarray, shares: np.ndarray, losses: np.ndarray) -> np.ndarray:
    columns = zip(laws, losses.T, strict=True)
    return np.array([_minimum(law, shares, column)[1] for law, column in columns])


def _fitted(shares: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Returns c and t of one task's law, the best of several starts."""
    starts = []
    for part in _STARTS:
        c = part * losses.min()
        starts.append(np.append(c, np.linalg.lstsq(shares, np.log(losses - c))[0]))
    return min((_minimum(start, shares, losses) for start in starts), key=lambda each: each[0])[1]


def _minimum(start: np.ndarray, shares: np.ndarray, losses: np.ndarray) -> tuple[float, np.ndarray]:
    """Returns (half the sum of squares, law) at a local minimum; no loss is below 0, nor is c."""

    def residuals(law: np.ndarray) -> np.ndarray:
        return law[0] + np.exp(np.minimum(shares @ law[1:], 50)) - losses

    def slopes(law: np.ndarray) -> np.ndarray:
        grown = np.exp(np.minimum(shares @ law[1:], 50))
        return np.column_stack([np.ones_like(losses), grown[:, None] * shares])

    lowest = np.append(0.0, np.full(len(start) - 1, -np.inf))
    result = optimize.least_squares(
        residuals, np.maximum(start, lowest + 1e-6), slopes, (lowest, np.inf), max_nfev=200
    )
    return float(result.cost), result.x


def _lowest(laws: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Returns the mixture of the lowest loss within the ranges of shares; a convex law has one."""
    found = optimize.minimize(
        lambda mixture: _loss(laws, mixture),
        shares.mean(axis=0),
        jac=lambda mixture: (np.exp(laws[:, 1:] @ mixture) @ laws[:, 1:]) / len(laws),
        bounds=np.column_stack([shares.min(axis=0), shares.max(axis=0)]),
        constraints={"type": "eq", "fun": lambda mixture: mixture.sum() - 1, "jac": np.ones_like},
        method="SLSQP",
    )
    return found.x
