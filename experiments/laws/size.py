"""Fits the loss of several models as a function of parameters N and training tokens D.

Chinchilla's form is E + A / N^α + B / D^β, Kaplan's ((Nc / N)^(αN / αD) + Dc / D)^αD. Both are
fitted to logarithms of losses with Huber's loss, from several starts. Source: Hoffmann et al. 2022
(arXiv:2203.15556), section 3.3 and appendix D.2; Kaplan et al. 2020 (arXiv:2001.08361), equation
1.5.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import optimize, special

from tasks.terminal.command_line import UserError

# Source: Hoffmann et al. 2022, appendix D.2: delta of Huber's loss and the grid of starts.
_DELTA = 1e-3
_LEAST_RUNS = 8
# The widest accepted interval of an exponent, as a share of the exponent.
_WIDEST = 0.5


@dataclasses.dataclass(frozen=True)
class Form:
    """A law of N and D."""

    names: tuple[str, ...]  # its constants
    exponents: tuple[str, ...]  # the constants that describe the loss's fall
    # (θ, ln N, ln D) -> ln L, with θ the fitted constants.
    log_loss: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    constants: Callable[[np.ndarray], tuple[float, ...]]  # θ -> the constants in order
    starts: tuple[tuple[float, ...], ...]  # values of each θ, tried in all combinations


def _chinchilla(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    a, b, e, alpha, beta = theta
    return special.logsumexp([a - alpha * n, b - beta * d, np.full_like(n, e)], axis=0)


def _kaplan(theta: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    nc, dc, alpha_n, alpha_d = theta
    return alpha_d * np.logaddexp((nc - n) * alpha_n / alpha_d, dc - d)


FORMS: Mapping[str, Form] = {
    "chinchilla": Form(
        ("E", "A", "B", "alpha", "beta"),
        ("alpha", "beta"),
        _chinchilla,
        lambda theta: (*np.exp(theta[[2, 0, 1]]), *theta[3:]),
        ((0.0, 5.0, 10.0), (0.0, 5.0, 10.0), (-1.0, 0.5), (0.2, 0.8), (0.2, 0.8)),
    ),
    "kaplan": Form(
        ("Nc", "Dc", "alpha_N", "alpha_D"),
        ("alpha_N", "alpha_D"),
        _kaplan,
        lambda theta: (*np.exp(theta[:2]), *theta[2:]),
        ((20.0, 30.0, 40.0), (20.0, 30.0, 40.0), (0.05, 0.2), (0.05, 0.2)),
    ),
}


@dataclasses.dataclass(frozen=True)
class SizeFit:
    """A fit of a form."""

    form: str
    theta: np.ndarray  # the fitted constants, some of them as logarithms
    draws: np.ndarray  # float64 [draws, constants], one fit per draw of the bootstrap over runs

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """Returns constant -> (value, low, high), with 95% intervals."""
        law = FORMS[self.form]
        drawn = np.array([law.constants(draw) for draw in self.draws])
        low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
        values = law.constants(self.theta)
        return {
            name: (float(value), float(a), float(b))
            for name, value, a, b in zip(law.names, values, low, high, strict=True)
        }

    def at(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Returns the (loss, low, high) of a model trained on `tokens`."""
        law, n, d = FORMS[self.form], np.log([parameters]), np.log([tokens])
        drawn = [np.exp(law.log_loss(draw, n, d))[0] for draw in self.draws]
        low, high = np.percentile(drawn, (2.5, 97.5))
        return float(np.exp(law.log_loss(self.theta, n, d))[0]), float(low), float(high)

    @property
    def refusal(self) -> str:
        """Returns the reason why the runs do not identify the law; "" if they do."""
        constants = self.constants()
        for name in FORMS[self.form].exponents:
            value, low, high = constants[name]
            if low <= 0 or high - low > _WIDEST * value:
                return (
                    f"the runs do not identify {name}: it is anywhere from {low:.3f} to "
                    f"{high:.3f} (95%); add runs with a wider range of "
                    f"{'parameters' if name in ('alpha', 'alpha_N') else 'tokens'}, or more seeds"
                )
        return ""


def fit(
    form: str,
    parameters: Sequence[float],
    tokens: Sequence[float],
    losses: Sequence[float],
    draws: int = 200,
    seed: int = 0,
) -> SizeFit:
    """Fits a form of FORMS to runs, given each run's parameters, tokens and loss in nats."""
    columns = {"parameters": parameters, "tokens": tokens, "loss": losses}
    for name, values in columns.items():
        for place, value in enumerate(values, 1):
            if not 0 < value < np.inf:
                raise UserError(
                    f"run {place} of {len(values)} has {name} {value:g}, which has no logarithm: "
                    "leave the run out"
                )
    n, d, y = (np.log(np.asarray(each, float)) for each in columns.values())
    if len(y) < _LEAST_RUNS:
        raise UserError(f"{len(y)} runs cannot identify a law of N and D: give {_LEAST_RUNS}")
    for name, column in (("parameters", n), ("tokens", d)):
        if len(np.unique(column)) < 3:
            raise UserError(
                f"the runs have {len(np.unique(column))} different numbers of {name}, which do "
                "not identify an exponent: give runs with 3 or more"
            )
    law = FORMS[form]
    starts = [np.array(start) for start in itertools.product(*law.starts)]
    best = min((_minimum(law, start, n, d, y) for start in starts), key=lambda each: each[0])[1]
    random = np.random.default_rng(seed)
    found = []
    for _ in range(draws):
        drawn = random.integers(0, len(y), len(y))
        found.append(_minimum(law, best, n[drawn], d[drawn], y[drawn])[1])
    return SizeFit(form, best, np.array(found))


def _minimum(
    law: Form, start: np.ndarray, n: np.ndarray, d: np.ndarray, y: np.ndarray
) -> tuple[float, np.ndarray]:
    """Returns (sum of Huber's losses, θ) at a local minimum."""

    def residuals(theta: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.nan_to_num(law.log_loss(theta, n, d) - y, nan=1e6, posinf=1e6, neginf=-1e6)

    # Huber's loss is nearly linear far from the minimum, so least squares first gets closer.
    near = optimize.least_squares(residuals, start, x_scale="jac", max_nfev=300)
    result = optimize.least_squares(
        residuals, near.x, loss="huber", f_scale=_DELTA, x_scale="jac", max_nfev=300
    )
    return float(result.cost), result.x
