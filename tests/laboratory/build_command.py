"""A build as a command of the laboratory, and how far it is."""

import contextlib
import pathlib
from collections.abc import Sequence
from typing import Any

from tasks.cache.manifest import MANIFEST, PLAN
from tasks.storage import files
from tests.laboratory.commands import Command, Done

MODULE = "pipeline.build"


class Build(Command):
    """A build of the cache in the folder `cache`, or of several in a folder."""

    def __init__(self, cache: pathlib.Path, words: Sequence[object], log: pathlib.Path, **how: Any):
        self.cache, self.redone = cache, 0
        self._finished: dict[pathlib.Path, tuple[int, int] | None] = {}
        super().__init__([MODULE, *words], log, name="a build", **how)

    def start(self, *more: str, **how: Any) -> Command:
        self._count_redone()
        return super().start(*more, **how)

    def finish(self) -> Done:
        done = super().finish()
        self._count_redone()
        return done

    def _count_redone(self) -> None:
        """Counts finished shards that have gone or changed since the last start."""
        self.redone += sum(_identity(path) != before for path, before in self._finished.items())
        receipts = self.cache.rglob("*.receipt-*")
        names = (path.with_name(path.name.replace("receipt", "tfrecord")) for path in receipts)
        self._finished = {path: _identity(path) for path in names if path.exists()}

    def shards(self, split: str = "*") -> int:
        return len(list(self.cache.rglob(f"{split}.receipt-*")))

    def is_planned(self) -> bool:
        return any(self.cache.rglob(PLAN))

    def is_writing(self) -> bool:
        return any(self.cache.rglob(f"{files.PARTIAL}*.tfrecord-*"))

    is_working = is_writing

    def _doing(self) -> str:
        if any(self.cache.rglob(MANIFEST)):
            return "ending"
        return "writing shards" if any(self.cache.rglob(f"{files.PARTIAL}*")) else "starting"


def _identity(path: pathlib.Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        state = path.stat()
        return state.st_ino, state.st_mtime_ns
    return None
