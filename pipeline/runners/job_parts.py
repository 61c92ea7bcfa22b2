"""A job in parts: processes that share its pieces and its folder, as the tasks of an array job do.

A part works on every N-th piece. While it runs it holds a lock of its own, which keeps away its
double and whole jobs. To plan and to finish the job it also takes the folder's lock, for which it
waits. The part that finds all pieces finished, after its own, finishes the job, so the last one
does; any part that comes later, or once more, does what is missing of its share.
"""

import contextlib
import dataclasses
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import TypeVar

from tasks.storage import files, lock
from tasks.terminal.flag_fields import Rule, field

_WAIT_SECONDS = 0.5
# Refusals in a row by a whole job, whose lock may just have been left by a part.
_REFUSALS = 4
# Parts that are named among those that have not finished.
_NAMED = 5

_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Share:
    """Part `number` of a job in `count` parts; parts 0 and `count` are the same one."""

    number: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    @property
    def name(self) -> str:
        return "" if self.is_whole else f"{self.number % self.count or self.count}-of-{self.count}"

    def of(self, items: Sequence[_Item]) -> Sequence[_Item]:
        """Returns the items of the part."""
        return items[self.number % self.count :: self.count]


def _read(text: str) -> Share | None:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    share = Share(*map(int, found.groups())) if found else None
    return share if share and share.number <= share.count > 0 else None


def option() -> str | None:
    """Returns the field of the flag --part."""
    return field(
        None,
        "K/N: work on one of N equal parts of the job, beside processes that work on the others in "
        "the same folder; the last one finishes the job. The parts are 1 to N or 0 to N-1",
        rule=Rule(
            "K/N, the part's number, from 1 to N or from 0 to N-1, and the number of parts",
            lambda text: _read(text) is not None,
        ),
    )


def share(part: str | None) -> Share:
    """Returns the share that --part names; everything if it is not given."""
    return (_read(part) if part else None) or Share()


class Claim:
    """A folder that is locked for a part of a job, or for all of it."""

    def __init__(self, own: lock.Lock, what: str, flag: str, share: Share):
        self.share, self._own, self._what, self._flag = share, own, what, flag

    def check(self) -> None:
        """Raises UserError if the lock was lost."""
        self._own.check()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keeps the other parts from planning and finishing the job during the block."""
        with contextlib.ExitStack() as stack:
            refusals = 0
            while not self.share.is_whole:
                folder = lock.held(self._own.folder, self._what, self._flag, self.share.name)
                try:
                    taken = stack.enter_context(folder)
                except lock.Refused as error:
                    refusals = 0 if error.part else refusals + 1
                    if refusals == _REFUSALS:
                        raise
                    time.sleep(_WAIT_SECONDS)
                else:
                    stack.callback(taken.check)
                    break
            yield

    def tidy(self) -> None:
        """Deletes partial files, in a block `alone`, if no other part is running."""
        if not self.share.is_whole and not lock.living_part(self._own.folder, self.share.name):
            files.remove_partial(self._own.folder)

    def unfinished(self, missing: Collection[int], count: int) -> str:
        """Returns lines about the parts with `missing` pieces, of `count` pieces in all."""
        parts, running = self.share.count, lock.parts(self._own.folder)
        lost = Counter(number % parts for number in missing)
        lines = [
            f"part {self.share.name.replace('-', ' ')} is finished; the last part to finish "
            f"completes {self._own.folder}"
        ]
        for number in sorted(lost, key=lambda number: number or parts)[:_NAMED]:
            of, name = len(range(number, count, parts)), Share(number, parts).name
            state = "has not run" if lost[number] == of else "has stopped"
            if name in running:
                state = f"is running ({running[name]})"
            zero = "" if number else f", or 0 of {parts},"
            lines.append(
                f"part {name.replace('-', ' ')}{zero} {state}: {lost[number]:,} of its {of:,} "
                "pieces are missing"
            )
        if len(lost) > _NAMED:
            lines.append(f"… and {len(lost) - _NAMED:,} more")
        return "\n".join(lines)


@contextlib.contextmanager
def claimed(folder: str, what: str, flag: str, share: Share) -> Iterator[Claim]:
    """Creates and locks a folder for a share of a job; raises as `lock.claimed` does."""
    if share.is_whole:
        with lock.claimed(folder, what, flag) as own:
            yield Claim(own, what, flag, share)
        return
    files.make_folder(folder)
    with lock.held(folder, what, flag, share.name, shared=True) as own:
        yield Claim(own, what, flag, share)
