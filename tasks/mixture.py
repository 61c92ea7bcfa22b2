"""Mixtures: tasks and the rates at which a run reads their examples."""

import dataclasses
from collections.abc import Mapping

from tasks.terminal.command_line import UserError


@dataclasses.dataclass(frozen=True)
class MixtureSpec:
    """Tasks with rates, as in seqio's Mixture.

    A rate is a weight. A rate of None stands for the number of the task's examples (windows of its
    training split), limited to `maximum` (the T5 paper's K), to the power of 1 / `temperature`.

    Source: Raffel et al. 2020, section 3.5.2; seqio `utils.py`, mixing_rate_num_examples.

    Raises:
      ValueError: at construction, if a rate is not above 0, a task is named twice, or `maximum` or
        `temperature` is set and every task has a rate of its own.
    """

    name: str
    tasks: tuple[tuple[str, float | None], ...]
    maximum: int | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.tasks]
        if not names:
            raise ValueError(f"mixture {self.name} has no tasks")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"mixture {self.name} names task {name} twice")
        for name, rate in self.tasks:
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"mixture {self.name}: the rate of {name} is {rate}, not above 0")
        if self.maximum is not None and self.maximum < 1:
            raise ValueError(f"mixture {self.name}: maximum is {self.maximum}, not 1 or more")
        if not self.temperature > 0:
            raise ValueError(f"mixture {self.name}: temperature is {self.temperature}, not above 0")
        fixed = all(rate is not None for _, rate in self.tasks)
        if fixed and (self.maximum is not None or self.temperature != 1.0):
            raise ValueError(
                f"mixture {self.name}: maximum and temperature apply to rates that are numbers of "
                "examples, and every task has a rate of its own: leave the rates out"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(name for name, _ in self.tasks)

    def weights(self, examples: Mapping[str, int]) -> dict[str, float]:
        """Returns each task's weight, not normalised, given its number of examples."""

        def of_examples(name: str) -> float:
            limited = min(examples[name], self.maximum or examples[name])
            return float(limited) ** (1 / self.temperature)

        return {
            name: of_examples(name) if rate is None else float(rate) for name, rate in self.tasks
        }


def parse(text: str) -> MixtureSpec:
    """Parses "a=0.7,b=0.3", or "a,b" with rates in proportion to the numbers of examples.

    Raises:
      UserError: the text is not such a list.
    """
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


def checked(**fields) -> MixtureSpec:
    """Returns MixtureSpec(**fields), whose errors are reported as the user's.

    Raises:
      UserError: the fields are not those of a valid mixture.
    """
    try:
        return MixtureSpec(**fields)
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_schedule(text: str) -> tuple[tuple[int, MixtureSpec], ...]:
    """Parses "20000: a=0.5,b=0.5; 40000: a,b", the rates from each step on.

    A step is the number of updates made before: update 20,001 is the first with the rates of 20000.

    Raises:
      UserError: the text is not such a list, or its steps do not ascend.
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
