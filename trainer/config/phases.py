"""Phases of a run: batches that change their number of rows, and quantities given in tokens."""

import bisect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tasks.objectives import Lengths
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import Rule
from trainer.config import fields
from trainer.config.skips import Skips

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)([KMBT])")


class Entry(NamedTuple):
    """An entry of a schedule: `boundary` is a number of batches, or of tokens if `in_tokens`."""

    boundary: int
    in_tokens: bool
    rows: int


def tokens_of(text: str) -> int | None:
    """Returns the number of tokens that "2B", "1.5B" or "500M" names; None for another text."""
    found = _TOKENS.fullmatch(text.strip())
    if not found:
        return None
    whole, _, part = found[1].partition(".")
    scaled, rest = divmod(int(whole + part) * _UNITS[found[2]], 10 ** len(part))
    return None if rest else scaled


def parse(text: str) -> list[Entry]:
    """Parses "2000: 64; 2B: 128"; raises ValueError for another text."""
    entries = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        begin, _, rows = (piece.strip() for piece in part.partition(":"))
        tokens = tokens_of(begin)
        entries.append(
            Entry(int(begin) if tokens is None else tokens, tokens is not None, int(rows))
        )
    batches = [each.boundary for each in entries if not each.in_tokens]
    amounts = [each.boundary for each in entries if each.in_tokens]
    ascending = all(values == sorted(set(values)) for values in (batches, amounts))
    if not ascending or any(each.boundary < 1 or each.rows < 1 for each in entries):
        raise ValueError(f"{text}: boundaries must ascend, and batches have rows")
    return entries


def _holds(text: str) -> bool:
    try:
        parse(text)
    except ValueError:
        return False
    return True


SCHEDULE = Rule(
    "BOUNDARY: ROWS; … with ascending boundaries, each a number of updates or of tokens, such as "
    "'2000: 64; 2B: 128'",
    _holds,
)
TOKENS = Rule("a number of tokens, such as 300B, 1.5B or 500M", lambda text: bool(tokens_of(text)))


class Phases:
    """The rows of a run's batches, and where they lie in its endless order of rows.

    Batches and updates count from 1. Batch b has the rows after those of all batches before it, so
    that a change of their number neither loses nor repeats a row. `skips` says which batch an
    update reads.
    """

    def __init__(
        self, rows: int, changes: Sequence[tuple[int, int]] = (), skips: Skips | None = None
    ):
        """`changes` are ascending (batches before, rows of each batch from then on)."""
        self.skips = skips or Skips()
        self._begins = [0, *(begin for begin, _ in changes)]
        self.sizes = (rows, *(size for _, size in changes))
        self.changes = list(changes)
        self._passed = [0]
        for number in range(len(changes)):
            count = self._begins[number + 1] - self._begins[number]
            self._passed.append(self._passed[-1] + count * self.sizes[number])

    def rows(self, batch: int) -> int:
        """Returns the number of rows of a batch."""
        return self.sizes[bisect.bisect_left(self._begins, batch) - 1]

    def passed(self, batch: int) -> int:
        """Returns the number of rows in all batches up to this one."""
        phase = bisect.bisect_right(self._begins, batch) - 1
        return self._passed[phase] + (batch - self._begins[phase]) * self.sizes[phase]

    def described(self, updates: int) -> str:
        """Returns the rows of the first updates' batches, such as "32, later 64"."""
        last = self.skips.batch(updates)
        found = (size for begin, size in zip(self._begins, self.sizes, strict=True) if begin < last)
        return ", later ".join(map(str, found))

    def batches(self, rows: int) -> int:
        """Returns the number of batches that these many rows fill."""
        phase = bisect.bisect_right(self._passed, rows) - 1
        return self._begins[phase] + (rows - self._passed[phase]) // self.sizes[phase]

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
    """Returns the phases of a configuration whose schedule is in updates."""
    entries = parse(config.batch_schedule)
    assert not any(each.in_tokens for each in entries)
    changes = [(each.boundary, each.rows) for each in entries]
    return Phases(config.batch_size, changes, config.data.skips)


def in_updates(config: Any, origins: dict[str, str], lengths: Lengths) -> Any:
    """Returns a `trainer.config.Config` with its quantities in tokens converted to updates.

    As in `tokens_per_batch`, a row has as many tokens as its longer feature is long. A boundary
    lies before the first batch that begins after this many tokens, and a run ends with the first
    update that reaches them. Raises a UserError if boundaries do not ascend.
    """
    length = max(lengths.inputs, lengths.targets)
    changes: list[tuple[int, int]] = []
    for entry in parse(config.batch_schedule):
        begin = entry.boundary
        if entry.in_tokens:
            begin = Phases(config.batch_size, changes).updates(-(-begin // length))
        if changes and begin <= changes[-1][0]:
            raise UserError(
                f"--batch_schedule={config.batch_schedule}: the boundaries must ascend, but with "
                f"rows of {length} tokens they are after {changes[-1][0]} and {begin} updates"
            )
        changes.append((begin, entry.rows))
    schedule = "; ".join(f"{begin}: {rows}" for begin, rows in changes)
    config = fields.replace(config, "batch_schedule", schedule)
    if config.train_tokens is None:
        return config
    if origins.get("train_steps") == "command line":
        raise UserError("--train_tokens and --train_steps are alternatives: set only one")
    text, tokens = config.train_tokens, tokens_of(config.train_tokens)
    assert tokens
    origins["train_steps"] = f"--train_tokens={text}"
    origins.pop("train_tokens", None)
    steps = phases_of(config).updates(-(-tokens // length))
    return fields.replace_all(config, {"train_steps": steps, "train_tokens": None})
