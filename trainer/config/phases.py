"""Phases of a run: batches that change their rows or lengths, and quantities given in tokens."""

import bisect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Rule
from trainer.config import field_paths
from trainer.config.skips import Skips

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([KMBT])")
_SIDES = ("inputs", "targets")


class Entry(NamedTuple):
    """An entry of a schedule: `boundary` is a number of batches, or of tokens if `in_tokens`."""

    boundary: int
    in_tokens: bool
    values: dict[str, int]


class Phase(NamedTuple):
    """Batches alike: how many come before them, and the rows and lengths of each."""

    begin: int
    rows: int
    lengths: Lengths

    @property
    def tokens(self) -> int:
        """The tokens of a batch, by the longer feature's length."""
        return self.rows * max(self.lengths.inputs, self.lengths.targets)


def tokens_of(text: str) -> int | None:
    """Returns the number of tokens that "2B", "1.5B" or "500M" names; None for another text."""
    found = _TOKENS.fullmatch(text.strip())
    if not found:
        return None
    whole, _, part = found[1].partition(".")
    scaled, rest = divmod(int(whole + part) * _UNITS[found[2]], 10 ** len(part))
    return None if rest else scaled


def parse(text: str, sides: Sequence[str] = ()) -> list[Entry]:
    """Parses "2000: 64; 2B: 128", or with `sides` "2000: inputs=4096,targets=910".

    Raises ValueError for another text.
    """
    entries = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        begin, _, given = (piece.strip() for piece in part.partition(":"))
        tokens = tokens_of(begin)
        named = [each.split("=") for each in (given.split(",") if sides else [f"rows={given}"])]
        values = {name.strip(): int(value) for name, value in named}
        if not values.keys() <= set(sides or ["rows"]) or len(values) < len(named):
            raise ValueError(f"{part} names something else")
        entries.append(Entry(int(begin) if tokens is None else tokens, tokens is not None, values))
    batches = [entry.boundary for entry in entries if not entry.in_tokens]
    amounts = [entry.boundary for entry in entries if entry.in_tokens]
    ascending = all(values == sorted(set(values)) for values in (batches, amounts))
    if not ascending or any(min(entry.boundary, *entry.values.values()) < 1 for entry in entries):
        raise ValueError(f"{text}: boundaries must ascend, and no number is below 1")
    return entries


def _holds(text: str, sides: Sequence[str] = ()) -> bool:
    try:
        parse(text, sides)
    except ValueError:
        return False
    return True


_ASCEND = "with ascending boundaries, each a number of updates or of tokens, such as"
ROWS = Rule(f"BOUNDARY: ROWS; … {_ASCEND} '2000: 64; 2B: 128'", _holds)
LENGTHS = Rule(
    f"BOUNDARY: inputs=TOKENS,targets=TOKENS; … {_ASCEND} '8000: inputs=4096,targets=910'",
    lambda text: _holds(text, _SIDES),
)
TOKENS = Rule("a number of tokens, such as 300B, 1.5B or 500M", lambda text: bool(tokens_of(text)))


class Phases:
    """The phases of a run's batches, and where their rows lie in its endless order of rows.

    Batches and updates count from 1. The rows of a batch follow the rows of the batch before, so
    that a change of their number neither loses nor repeats one. `skips` says which batch an
    update reads.
    """

    def __init__(self, phases: Sequence[Phase], skips: Skips | None = None):
        """`phases` ascend, the first from 0 on."""
        self.phases, self.skips = tuple(phases), skips or Skips()
        self._begins = [each.begin for each in phases]
        self._count(lambda phase: phase.rows)

    def _count(self, weight: Callable[[Phase], int]) -> None:
        self._weights, self._passed = [weight(phase) for phase in self.phases], [0]
        for number, size in enumerate(self._weights[:-1]):
            count = self._begins[number + 1] - self._begins[number]
            self._passed.append(self._passed[-1] + count * size)

    def weighted(self, weight: Callable[[Phase], int]) -> "Phases":
        """Returns phases whose methods count the `weight` of a batch instead of its rows."""
        other = Phases(self.phases, self.skips)
        other._count(weight)
        return other

    @property
    def in_tokens(self) -> "Phases":
        """Phases whose methods count tokens instead of rows."""
        return self.weighted(lambda phase: phase.tokens)

    @property
    def sizes(self) -> list[int]:
        """The rows of a batch in each phase."""
        return [phase.rows for phase in self.phases]

    @property
    def stages(self) -> list[Phase]:
        """The first phase, and each that changes lengths."""
        return [
            each
            for number, each in enumerate(self.phases)
            if not number or each.lengths != self.phases[number - 1].lengths
        ]

    @property
    def longest(self) -> Lengths:
        """The longest inputs and targets."""
        every = [phase.lengths for phase in self.phases]
        return Lengths(max(each.inputs for each in every), max(each.targets for each in every))

    @property
    def nest(self) -> Lengths | None:
        """The longest lengths if lengths change, else None."""
        return self.longest if len(self.stages) > 1 else None

    def of(self, batch: int) -> Phase:
        """Returns the phase of a batch."""
        return self.phases[bisect.bisect_left(self._begins, batch) - 1]

    def passed(self, batch: int) -> int:
        """Returns the number of rows in all batches up to this one."""
        phase = bisect.bisect_right(self._begins, batch) - 1
        return self._passed[phase] + (batch - self._begins[phase]) * self._weights[phase]

    def described(self, updates: int) -> str:
        """Returns the rows of the first updates' batches, such as "32, later 64"."""
        last = self.skips.batch(updates)
        found = dict.fromkeys(phase.rows for phase in self.phases if phase.begin < last)
        return ", later ".join(map(str, found))

    def batches(self, rows: int) -> int:
        """Returns the number of batches that these many rows fill."""
        phase = bisect.bisect_right(self._passed, rows) - 1
        return self._begins[phase] + (rows - self._passed[phase]) // self._weights[phase]

    def read(self, updates: int) -> int:
        """Returns the number of rows that the first updates read, without skipped batches."""
        last = self.skips.batch(updates)
        left_out = self.skips.up_to(last)
        skipped = sum(self.passed(end - 1) - self.passed(first - 1) for first, end in left_out)
        return self.passed(last) - skipped

    def updates(self, rows: int) -> int:
        """Returns the least number of updates that read this many rows."""
        return 1 + bisect.bisect_left(range(1, 2**31), rows, key=self.read)


def phases_of(config: Any) -> Phases:
    """Returns the phases of a configuration whose schedules are in updates."""
    return Phases([*_walk(config)], config.data.skips)


def _walk(config: Any) -> Iterator[Phase]:
    """Yields the phases, in whose schedules numbers of tokens are converted to batches."""
    lengths = {side: getattr(config.lengths, side) or 0 for side in _SIDES}
    now = Phase(0, config.batch_size, Lengths(**lengths))
    waiting = [parse(config.batch_schedule), parse(config.length_schedule, _SIDES)]
    passed = 0  # tokens before `now`

    def batch(entry: Entry) -> int:
        if entry.in_tokens:
            return now.begin - (passed - entry.boundary) // now.tokens
        return entry.boundary

    while any(waiting):
        begin = min(batch(each[0]) for each in waiting if each)
        if begin <= now.begin:
            raise UserError(
                f"--batch_schedule={config.batch_schedule!r} and --length_schedule="
                f"{config.length_schedule!r}: boundaries must ascend, but an entry comes "
                f"before the one that takes effect after {now.begin} updates"
            )
        due = [bool(each) and batch(each[0]) == begin for each in waiting]
        yield now
        passed += (begin - now.begin) * now.tokens
        rows, lengths = now.rows, {side: getattr(now.lengths, side) for side in _SIDES}
        for entries, is_due in zip(waiting, due, strict=True):
            values = entries.pop(0).values if is_due else {}
            rows = values.pop("rows", rows)
            lengths |= values
        now = Phase(begin, rows, Lengths(**lengths))
    yield now


def in_updates(config: Any, origins: dict[str, str]) -> Any:
    """Returns a `trainer.config.Config` with its quantities in tokens converted to updates.

    As in `tokens_per_batch`, a row has as many tokens as its longer feature is long. A boundary
    lies before the first batch that begins after this many tokens, and a run ends with the first
    update that reaches them. Raises a UserError if boundaries do not ascend.
    """
    phases = phases_of(config)
    rows, lengths = [], []
    for before, now in zip(phases.phases, phases.phases[1:], strict=False):
        if now.rows != before.rows:
            rows.append(f"{now.begin}: {now.rows}")
        if now.lengths != before.lengths:
            values = {side: getattr(now.lengths, side) for side in _SIDES}
            sides = [f"{side}={value}" for side, value in values.items() if value]
            lengths.append(f"{now.begin}: {','.join(sides)}")
    new: dict[str, Any] = {"batch_schedule": "; ".join(rows), "length_schedule": "; ".join(lengths)}
    if config.train_tokens is not None:
        if origins.get("train_steps") == "command line":
            raise UserError("--train_tokens and --train_steps are alternatives: set only one")
        steps = phases.in_tokens.updates(tokens_of(config.train_tokens) or 0)
        by = f"--train_tokens={config.train_tokens}"
        config = field_paths.implied(config, origins, {"train_steps": steps}, by)
        origins.pop("train_tokens", None)
        new["train_tokens"] = None
    return field_paths.replace_all(config, new)
