"""Mixtures: tasks and the rates at which a run reads their examples."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tasks.terminal.command_line import UserError

__all__ = ["MixtureSpec"]

# A difference of sums that is further off than this is replaced by a sum. The shares of mixtures
# whose weights differ less remain those of version 0.2.0, to the last bit.
_CANCELLED = 1e-9

# Measures of a task's size: windows of its training split at this run's lengths, or the split's
# documents, tokens or UTF-8 bytes according to its manifest.
SIZES = ("examples", "documents", "tokens", "bytes")


@dataclasses.dataclass(frozen=True)
class MixtureSpec:
    """Tasks with rates, as in seqio's Mixture.

    A rate is a weight. A rate of None means the task's size, capped at `maximum` (the T5 paper's
    K), to the power of `alpha` or 1 / `temperature`: 1 samples in proportion to size, mT5's 0.3
    favours small languages, and 0 gives equal rates. `size` is one of SIZES.

    `max_epochs` limits how often a run may read a task; the excess goes to the other tasks in
    proportion to their rates. With `alpha=0` this is UniMax.

    Source: Raffel et al. 2020, section 3.5.2; seqio `utils.py`, mixing_rate_num_examples; Xue et
      al. 2021 (mT5, arXiv:2010.11934), section 3.2; Chung et al. 2023 (UniMax, arXiv:2304.09151),
      algorithm 1.

    Raises ValueError at construction if a value is out of range, a task is named twice, both
    `alpha` and `temperature` are set, or a setting for sizes is given though every task has its own
    rate.
    """

    name: str
    tasks: tuple[tuple[str, float | None], ...]
    maximum: int | None = None
    temperature: float = 1.0
    alpha: float | None = None
    max_epochs: float | None = None
    size: str = SIZES[0]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ValueError(f"mixture {self.name} has no tasks")
        for name, rate in self.tasks:
            if self.names.count(name) > 1:
                raise ValueError(f"mixture {self.name} names task {name} twice")
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"mixture {self.name}: the rate of {name} is {rate}, not above 0")
        alpha, epochs = self.alpha, self.max_epochs
        for field, holds, rule in (
            ("maximum", self.maximum is None or self.maximum >= 1, "1 or more"),
            ("temperature", self.temperature > 0, "above 0"),
            ("alpha", alpha is None or 0 <= alpha <= 1, "from 0 to 1"),
            ("max_epochs", epochs is None or 0 < epochs < float("inf"), "above 0"),
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
        ):
            if not holds:
                raise ValueError(
                    f"mixture {self.name}: {field} must be {rule}, not {getattr(self, field)}"
                )
        if alpha is not None and self.temperature != 1.0:
            same = 1 / alpha if alpha else float("inf")
            raise ValueError(
                f"mixture {self.name}: alpha={alpha:g} implies a temperature of {same:g}, "
                f"but temperature is {self.temperature:g}: set only one of them"
            )
        fixed = all(rate is not None for _, rate in self.tasks)
        unread = (self.maximum, self.temperature, alpha, self.size) != (None, 1.0, None, SIZES[0])
        if fixed and unread:
            raise ValueError(
                f"mixture {self.name}: maximum, alpha, temperature and size apply to rates that "
                "follow from the sizes of tasks, but every task has its own rate: leave out "
                "the rates"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.tasks)

    def weights(self, sizes: Mapping[str, float]) -> dict[str, float]:
        """Returns each task's unnormalised weight, given its size."""
        power = 1 / self.temperature if self.alpha is None else self.alpha
        limited = {name: min(size, self.maximum or size) for name, size in sizes.items()}
        return {
            name: float(limited[name]) ** power if rate is None else float(rate)
            for name, rate in self.tasks
        }


def limited_shares(
    weights: Mapping[str, float], limits: Mapping[str, float], rows: float
) -> dict[str, float]:
    """Returns each task's share of a run of `rows` rows, none above its limit in rows.

    Tasks below their limits share in proportion to their weights. Raises ValueError if the limits
    total fewer than `rows`.

    Source: Chung et al. 2023 (UniMax, arXiv:2304.09151), algorithm 1, whose weights are all equal.
    """
    most = sum(limits[name] for name in weights)
    if most < rows:
        raise ValueError(f"the limits allow {most:,.0f} rows, but the run reads {rows:,.0f}")
    shares: dict[str, float] = {}
    left, weight = float(rows), sum(weights.values())
    # The task with the fewest rows per weight reaches its limit first.
    names = sorted(weights, key=lambda name: limits[name] / weights[name])
    for number, name in enumerate(names, 1):
        taken = min(limits[name], left * weights[name] / weight)
        shares[name] = taken / rows
        left, weight = left - taken, weight - weights[name]
        rest = math.fsum(weights[other] for other in names[number:])
        if abs(weight - rest) > _CANCELLED * rest:
            weight = rest
    return {name: shares[name] for name in weights}


def parse(text: str) -> MixtureSpec:
    """Parses "a=0.7,b=0.3", or "a,b" with rates by size; raises UserError if `text` is neither."""
    tasks: list[tuple[str, float | None]] = []
    for part in text.split(","):
        name, equals, rate = (piece.strip() for piece in part.partition("="))
        try:
            tasks.append((name, float(rate) if equals else None))
        except ValueError as error:
            raise UserError(f"{text}: the rate of {name} is {rate}, not a number") from error
        if not name:
            raise UserError(f"{text}: a name is missing; write TASK=RATE,TASK=RATE or TASK,TASK")
    return checked(name=text.strip(), tasks=tuple(tasks))


def checked(**fields: Any) -> MixtureSpec:
    """Returns MixtureSpec(**fields); raises UserError if they are invalid."""
    try:
        return MixtureSpec(**fields)
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_schedule(text: str) -> tuple[tuple[int, MixtureSpec], ...]:
    """Parses "20000: a=0.5,b=0.5; 40000: a,b", the rates from each step on.

    A step counts completed updates: update 20,001 is the first with the rates of 20000. Steps must
    ascend.
    """
    entries = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        step, colon, rates = part.partition(":")
        if not colon or not step.strip().isdigit() or not int(step):
            raise UserError(f"{part}: write STEP:TASK=RATE,TASK=RATE; …, with steps of 1 or more")
        entries.append((int(step), parse(rates)))
    steps = [step for step, _ in entries]
    if steps != sorted(set(steps)):
        raise UserError(f"{text}: the steps must ascend")
    return tuple(entries)
