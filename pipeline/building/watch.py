"""A running build, watched through its folder: the same for any runner and wherever it works."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.building.graph import EMPTY, Assignment
from pipeline.building.write import finished
from pipeline.runners.beam_job import interrupt
from tasks.cache.manifest import Plan, Shard, shard_file
from tasks.storage import files
from tasks.terminal import progress

# How often to look, by whether the folder is remote, where a listing takes long and is paid for.
_LOOK_SECONDS = {False: 0.5, True: 10.0}
# Bytes of text per byte of rows, until finished pieces tell: about 4 bytes a token, 1.7 stored.
_TEXT_PER_ROW_BYTE = 2.4


def bad_share(shards: list[Shard], unseen: float = 0.0) -> float:
    """Returns the share of documents that were left out as faulty, empty ones counted as neither.

    An empty document loses nothing, and some corpora are full of blank lines; the rest are damage.
    `unseen`: part of the corpus not read yet, taken to be good and as dense.
    """
    bad = sum(
        count for shard in shards for reason, count in shard.dropped.items() if reason != EMPTY
    )
    total = bad + sum(shard.documents for shard in shards)
    return bad / total * (1 - unseen) if total else 0.0


class Watch:
    """What the folder of a running build shows.

    Attributes:
      shards: receipts of the finished shards.
      total: bytes of the whole corpus.
      done: bytes of it that are finished or, by the sizes of what is being written, in work.
    """

    def __init__(
        self, folder: str, plan: Plan, kept: dict[Assignment, list[Shard]], to_do: list[Assignment]
    ):
        self._folder = folder
        self._plan = plan
        self._waiting = to_do
        self._finished = sum(assignment.piece.bytes for assignment in kept)
        self._started = time.monotonic()
        self._seen = self._written = 0
        self.shards = [shard for shards in kept.values() for shard in shards]
        self.before = self.done = float(self._finished)
        self.total = self._finished + sum(assignment.piece.bytes for assignment in to_do)

    @property
    def unseen(self) -> float:
        """Part of the corpus that no finished shard holds."""
        return 1 - self._finished / self.total if self.total else 0.0

    @property
    def note(self) -> str:
        """Speed and losses so far, for the progress bar."""
        rate = (self.done - self.before) / max(time.monotonic() - self._started, 1e-9)
        left_out = sum(sum(shard.dropped.values()) for shard in self.shards)
        return f"{rate / 1e6:.1f} MB/s  {left_out:,} quarantined"

    def look(self) -> None:
        """Reads the receipts that are new, and the sizes of what is being written."""
        names = set(files.list_names(self._folder))
        partial = {
            name.removeprefix(files.PARTIAL).partition("-")[2]: name
            for name in names
            if name.startswith(files.PARTIAL)
        }
        waiting, writing = [], 0
        for assignment in self._waiting:
            if names.issuperset(self._names(assignment, "receipt")):
                self._count(assignment)
            else:
                waiting.append(assignment)
                rows = self._names(assignment, "tfrecord")
                writing += sum(self._size(partial[name]) for name in rows if name in partial)
        self._waiting = waiting
        ratio = self._seen / self._written if self._written else _TEXT_PER_ROW_BYTE
        left = self.total - self._finished
        self.done = max(self.done, self._finished + min(writing * ratio, 0.99 * left))

    def _names(self, assignment: Assignment, kind: str) -> list[str]:
        return [
            shard_file(split, kind, index, self._plan.shards[split])
            for split, index in assignment.shards
        ]

    def _count(self, assignment: Assignment) -> None:
        self._finished += assignment.piece.bytes
        self._seen += assignment.piece.bytes
        self._written += sum(self._size(name) for name in self._names(assignment, "tfrecord"))
        for split, index in assignment.shards:
            shard = finished(self._folder, self._plan, split, index, check=False)
            self.shards += [shard] if shard else []

    def _size(self, name: str) -> int:
        try:
            return files.size(files.join(self._folder, name))
        except FileNotFoundError:  # renamed since it was listed
            return 0


@contextlib.contextmanager
def watched(watch: Watch, remote: bool, hopeless: Callable[[Watch], bool]) -> Iterator[None]:
    """Shows progress while the block runs; interrupts it, as Ctrl-C does, once it is hopeless."""
    over = threading.Event()

    def loop(bar: progress.Progress) -> None:
        while not over.wait(_LOOK_SECONDS[remote]):
            watch.look()
            bar.update(watch.done, watch.note)
            if hopeless(watch):
                interrupt()
                return
        watch.look()
        bar.update(watch.done, watch.note)

    with progress.shown("building", watch.total, watch.before, "B") as bar:
        thread = threading.Thread(target=loop, args=(bar,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
