"""Shows a running build's progress, read from its folder, so every runner is supported."""

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from pipeline.building.documents import is_fault
from pipeline.building.graph import Assignment
from tasks.cache.manifest import Plan, Shard
from tasks.cache.receipts import finished
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.interruption import interrupt
from tasks.terminal.polling import polling

# Text bytes per row byte, assumed until a piece is finished: 4 bytes of text a token, 1.7 stored.
_TEXT_PER_ROW_BYTE = 2.4


def bad_share(shards: list[Shard], unseen: float = 0.0) -> float:
    """Returns the share of documents left out as faulty.

    Empty documents, which abound in some corpora, and those left out by choice (listed ones, long
    pairs) do not count. The unread share `unseen` is assumed to have the same number of documents
    per byte, all sound.
    """
    bad = sum(
        count for shard in shards for reason, count in shard.dropped.items() if is_fault(reason)
    )
    total = bad + sum(shard.documents for shard in shards)
    return bad / total * (1 - unseen) if total else 0.0


class Monitor:
    """State of a running build."""

    def __init__(
        self,
        folder: str,
        plan: Plan,
        kept: dict[Assignment, list[Shard]],
        to_do: list[Assignment],
        others: int = 0,  # bytes of the corpus that other parts of the job read
    ):
        self._folder, self._plan = folder, plan
        self._others = others
        self._waiting = to_do
        self._finished = sum(assignment.piece.bytes for assignment in kept)
        self._started = time.monotonic()
        self._seen = self._written = 0
        self.shards = [shard for shards in kept.values() for shard in shards]
        # Bytes of the corpus: those finished before this build; those finished now, plus an
        # estimate for pieces in progress from their file sizes; and the total.
        self.before = self.done = float(self._finished)
        self.total = self._finished + sum(assignment.piece.bytes for assignment in to_do)

    @property
    def unseen(self) -> float:
        total = self.total + self._others
        return 1 - self._finished / total if total else 0.0

    @property
    def note(self) -> str:
        """Speed and number of quarantined documents, or why neither is known yet."""
        if self.done == self.before:
            return "starting; the first build on a machine also compiles its tokenizer"
        rate = (self.done - self.before) / max(time.monotonic() - self._started, 1e-9)
        left_out = sum(sum(shard.dropped.values()) for shard in self.shards)
        return f"{rate / 1e6:.1f} MB/s  {left_out:,} quarantined"

    def look(self) -> None:
        """Lists the folder once, to read new receipts and measure files in progress."""
        sizes = files.list_sizes(self._folder)
        done: list[Assignment] = []
        waiting: list[Assignment] = []
        for each in self._waiting:
            (done if sizes.keys() >= each.names(self._plan, "receipt") else waiting).append(each)
        self._waiting = waiting
        for assignment in done:
            self._finished += assignment.piece.bytes
            self._seen += assignment.piece.bytes
            self._written += sum(
                sizes.get(name, 0) for name in assignment.names(self._plan, "tfrecord")
            )
        keys = [key for assignment in done for key in assignment.shards]
        read = lambda key: finished(self._folder, self._plan, key[0], key[1], sizes)  # noqa: E731
        with ThreadPoolExecutor(files.threads(self._folder)) as pool:
            self.shards += [shard for shard in pool.map(read, keys) if shard]
        rows = {name for each in waiting for name in each.names(self._plan, "tfrecord")}
        partial = (name for name in sizes if name.startswith(files.PARTIAL))
        writing = sum(sizes[name] for name in partial if files.final_name(name) in rows)
        ratio = self._seen / self._written if self._written else _TEXT_PER_ROW_BYTE
        left = self.total - self._finished
        self.done = max(self.done, self._finished + min(writing * ratio, 0.99 * left))


@contextlib.contextmanager
def monitored(
    monitor: Monitor, remote: bool, hopeless: Callable[[Monitor], bool]
) -> Iterator[None]:
    """Shows progress during the block; interrupts it, like Ctrl-C, once `hopeless` returns True."""
    with progress.shown("building", monitor.total, monitor.before, "B") as bar:

        def look() -> bool:
            monitor.look()
            bar.update(monitor.done, monitor.note)
            stop = hopeless(monitor)
            if stop:
                interrupt()
            return stop

        with polling(look, remote):
            yield
        # All receipts are read again at the end, so do not look again.
        monitor.done = monitor.total
        bar.update(monitor.done, monitor.note)
