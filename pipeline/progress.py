"""Progress of a build, seen from its folder: the same for any runner, and for workers elsewhere."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from pipeline.graph import EMPTY, Assignment, interrupt
from pipeline.write import finished
from tasks import files
from tasks.manifest import Plan, Shard, shard_file

_LINE_SECONDS = 5.0
_LOOK_SECONDS = {False: 0.5, True: 10.0}  # by whether the folder is remote: a listing costs there
# Bytes of text per byte of rows, until finished pieces tell: about 4 bytes a token, 1.7 stored.
_TEXT_PER_ROW_BYTE = 2.4


def bad_share(shards: list[Shard], unseen: float = 0.0) -> float:
    """Returns the share of documents that were quarantined, empty ones counted as neither.

    An empty document loses nothing and some corpora are full of blank lines; the rest are damage.
    `unseen`: part of the corpus not read yet, taken to be good and as dense.
    """
    bad = sum(
        count for shard in shards for reason, count in shard.dropped.items() if reason != EMPTY
    )
    total = bad + sum(shard.documents for shard in shards)
    return bad / total * (1 - unseen) if total else 0.0


class Watch:
    """Looks at the folder of a running build.

    Args:
      folder: the cache.
      plan: its plan.
      assignments: the pieces this build works on.
      kept: receipts of shards that were finished before.
      kept_bytes: bytes of the corpus that they hold.
    """

    def __init__(
        self,
        folder: str,
        plan: Plan,
        assignments: list[Assignment],
        kept: list[Shard],
        kept_bytes: int,
    ):
        self._folder = folder
        self._plan = plan
        self._waiting = list(assignments)
        self._started = time.monotonic()
        self._kept_bytes = kept_bytes
        self._total = sum(assignment.piece.bytes for assignment in assignments)
        self._finished_bytes = 0
        self._finished_rows_bytes = 0
        self.shards = list(kept)
        self.done_bytes = 0.0

    @property
    def total(self) -> int:
        """Bytes of the corpus that this build reads."""
        return self._total

    @property
    def rate(self) -> float:
        """Bytes of the corpus a second."""
        return self.done_bytes / max(time.monotonic() - self._started, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Estimated; None before anything is done."""
        return (self._total - self.done_bytes) / self.rate if self.done_bytes else None

    @property
    def unseen(self) -> float:
        """Part of the whole corpus that no finished shard holds."""
        whole = self._total + self._kept_bytes
        return 1 - (self._finished_bytes + self._kept_bytes) / whole if whole else 0.0

    @property
    def quarantined(self) -> int:
        """Documents left out so far."""
        return sum(sum(shard.dropped.values()) for shard in self.shards)

    def look(self) -> None:
        """Reads the receipts that are new, and the sizes of what is being written."""
        names = set(files.list_names(self._folder))
        partial = {
            name.removeprefix(files.PARTIAL).partition("-")[2]: name
            for name in names
            if name.startswith(files.PARTIAL)
        }
        waiting, running = [], 0
        for assignment in self._waiting:
            if all(name in names for name in self._files(assignment, "receipt")):
                self._count(assignment)
                continue
            waiting.append(assignment)
            for name in self._files(assignment, "tfrecord"):
                running += self._size(partial.get(name))
        self._waiting = waiting
        per_byte = _TEXT_PER_ROW_BYTE
        if self._finished_rows_bytes:
            per_byte = self._finished_bytes / self._finished_rows_bytes
        unfinished = sum(assignment.piece.bytes for assignment in waiting)
        done = self._finished_bytes + min(running * per_byte, 0.99 * unfinished)
        self.done_bytes = max(self.done_bytes, done)

    def _files(self, assignment: Assignment, kind: str) -> list[str]:
        return [
            shard_file(split, kind, index, self._plan.shards[split])
            for split, index in assignment.shards.items()
        ]

    def _count(self, assignment: Assignment) -> None:
        self._finished_bytes += assignment.piece.bytes
        for split, index in assignment.shards.items():
            shard = finished(self._folder, self._plan, split, index, check=False)
            if shard:
                self.shards.append(shard)
        self._finished_rows_bytes += sum(
            self._size(name) for name in self._files(assignment, "tfrecord")
        )

    def _size(self, name: str | None) -> int:
        with contextlib.suppress(FileNotFoundError):
            return files.size(files.join(self._folder, name)) if name else 0
        return 0


@contextlib.contextmanager
def shown(watch: Watch, remote: bool, stop: Callable[[Watch], bool]) -> Iterator[None]:
    """Shows progress on stdout while the block runs: a bar on a terminal, lines elsewhere.

    When `stop(watch)` says so, the job is interrupted as by Ctrl-C.
    """
    over = threading.Event()
    show = _bar if sys.stdout.isatty() else _lines

    def loop() -> None:
        with show(watch) as update:
            while not over.wait(_LOOK_SECONDS[remote]):
                watch.look()
                update()
                if stop(watch):
                    interrupt()
                    return
            watch.look()
            update()

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def _bar(watch: Watch) -> Iterator[Callable[[], None]]:
    from rich import progress

    columns = (
        progress.TextColumn("building"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        progress.TextColumn("{task.fields[left]} left"),
        progress.TextColumn("{task.fields[quarantined]} quarantined"),
    )
    with progress.Progress(*columns) as bar:
        task = bar.add_task("", total=watch.total, rate="", left="?", quarantined=0)

        def update() -> None:
            bar.update(
                task,
                completed=watch.done_bytes,
                rate=f"{watch.rate / 1e6:.1f} MB/s",
                left=_clock(watch.seconds_left),
                quarantined=watch.quarantined,
            )

        yield update


@contextlib.contextmanager
def _lines(watch: Watch) -> Iterator[Callable[[], None]]:
    shown_at = time.monotonic()

    def update() -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at < _LINE_SECONDS:
            return
        shown_at = time.monotonic()
        if not watch.done_bytes:
            print("starting", flush=True)
            return
        print(
            f"building {watch.done_bytes / max(watch.total, 1):4.0%}  "
            f"{watch.done_bytes / 1e6:,.1f} of {watch.total / 1e6:,.1f} MB  "
            f"{watch.rate / 1e6:.1f} MB/s  {_clock(watch.seconds_left)} left  "
            f"{watch.quarantined:,} quarantined",
            flush=True,
        )

    yield update


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
