"""Reads a cache while it is being built.

The plan, written before the first shard, fixes the number and order of shards; a shard is finished
once its receipt exists. Results do not depend on when or in which order shards were finished.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tasks.cache.manifest import (
    MANIFEST,
    PLAN,
    PLAN_MARK,
    CacheManifest,
    Plan,
    Shard,
    plan_from_dict,
    shard_file,
)
from tasks.cache.plan_check import PlanCheck
from tasks.cache.receipts import read_receipt
from tasks.storage import files, lock
from tasks.terminal.command_line import UserError
from tasks.terminal.programs import program

# Seconds, for a local and a remote folder, between looks at it and between tests of whether a wait
# is over.
_LOOK_SECONDS = (0.25, 2.0)
_PAUSE_SECONDS = 0.05


class Closed(Exception):
    """A wait was abandoned because the run ends."""


class Following:
    """A cache that is being built.

    Its `manifest` has the plan and each split's known shards: the first ones, without gaps. These
    lists grow when `look` finds more, unless the shards of an earlier state are given as `known`.
    """

    def __init__(
        self,
        folder: str,
        plan: Plan,
        patient: bool = False,  # if True, readers may wait for missing shards
        known: Mapping[str, Sequence[Shard]] | None = None,
    ):
        self.folder, self.patient, self._ended = folder, patient, known is not None
        self._shards = {split: list((known or {}).get(split, ())) for split in plan.shards}
        self.manifest = CacheManifest(plan, self._shards, {})
        self._plan_check = PlanCheck(folder, plan)
        self._read: dict[tuple[str, int], Shard] = {}
        self._looked: dict[tuple[str, int], float] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()

    def look(self, split: str, count: int) -> bool:
        """Returns whether the first `count` shards of a split are finished, and makes them known.

        Polls at intervals. Raises UserError if the folder now holds another cache, or none.
        """
        with self._lock:
            if len(self._shards[split]) >= count:
                return True
            now, asked = time.monotonic(), (split, count)
            if self._ended or now < self._looked.get(asked, 0.0):
                return False
            found = self._look(split, count)
            self._looked[asked] = time.monotonic() + _LOOK_SECONDS[files.is_remote(self.folder)]
            return found

    def _look(self, split: str, count: int) -> bool:
        self._check_plan()
        if files.exists(files.join(self.folder, MANIFEST)):
            manifest = _finished(self.folder)
            if manifest and manifest.plan.fingerprint == self._plan_check.fingerprint:
                for name, shards in manifest.splits.items():
                    self._shards[name] += shards[len(self._shards[name]) :]
                return True
        known = self._shards[split]
        needed = [(split, number) for number in range(len(known), count)]
        unread = [number for _, number in needed if (split, number) not in self._read]
        of = self.manifest.plan.shards[split]

        def read(number: int) -> Shard | None:
            path = files.join(self.folder, shard_file(split, "receipt", number, of))
            receipt = read_receipt(path)
            # Of another plan: its build goes on after a takedown, or precedes one.
            return receipt.shard if receipt and receipt.fits(self.manifest.plan) else None

        with ThreadPoolExecutor(files.threads(self.folder)) as pool:
            for number, shard in zip(unread, pool.map(read, unread), strict=True):
                if shard:
                    self._read[split, number] = shard
        if not all(each in self._read for each in needed):
            return False
        # The receipts may belong to another plan, begun since the first check.
        self._check_plan()
        found = [self._read.pop(each) for each in needed]
        for number, shard in enumerate(found, len(known)):
            if problem := self.manifest.problem(split, number, shard):
                raise UserError(
                    f"{self.folder}: {split} shard {number} {problem}: "
                    f"{self.manifest.plan.remedy.again}"
                )
        known += found
        return True

    def _check_plan(self) -> None:
        if self._plan_check.marked:
            return
        plan = _planned(self.folder)
        if plan is None:
            raise UserError(f"{self.folder} disappeared while it was being followed: restore it")
        if error := self._plan_check.against(plan):
            raise error

    def finished(self) -> tuple[int, int]:
        shards = self.manifest.plan.shards
        done = (len(files.list_sizes(self.folder, f"{split}.receipt-")) for split in shards)
        return sum(done), sum(shards.values())

    def pause(self) -> None:
        """Waits a moment; raises Closed after `close`."""
        if self._closed.wait(_PAUSE_SECONDS):
            raise Closed(self.folder)

    def close(self) -> None:
        """Ends all waits, including those of threads that make batches ahead."""
        self._closed.set()

    def wait(self, split: str, count: int, timeout_seconds: float | None) -> None:
        """Waits until the first `count` shards are known; raises as the function `wait` does."""
        ready = functools.partial(self.look, split, count)
        if not self.patient and not ready():
            raise self.refuse(split, count)
        wait(self.folder, ready, lambda: self.missing(split, count), self, timeout_seconds)

    def missing(self, split: str, count: int) -> str:
        first, of = len(self._shards[split]), self.manifest.plan.shards[split]
        some = f"shard {first}" if first + 1 == count else f"shards {first} to {count - 1}"
        return f"{split} {some} of {of:,} of {self.folder}"

    def refuse(self, split: str, count: int) -> UserError:
        return UserError(
            f"{self.missing(split, count)} are not built yet: {resume(self.folder, self.manifest)}"
        )


def resume(folder: str, manifest: CacheManifest | None) -> str:
    """Returns advice on a build that has ended."""
    if manifest is None:
        return f"start it with {program('pipeline.build')}"
    place, _, name = folder.rstrip("/").rpartition("/")
    where = place if name == manifest.plan.task else folder
    return (
        f"resume it with the same command, {program('pipeline.build')} "
        f"--task={manifest.plan.task} --cache_dir={where} …"
    )


def wait(
    folder: str,
    ready: Callable[[], bool],
    what: Callable[[], str],
    following: Following | None = None,
    timeout_seconds: float | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Waits until `ready()`; returns False if `stopping()` came first.

    Prints what it waits for (`what`), and advice if no build is running. Raises UserError if no
    build ran and no shard was finished for `timeout_seconds` (None: no limit), or as `ready` does,
    which is called often. `following` is the cache, if its plan is known.
    """
    if ready():
        return True
    observer, begun = lock.Observer(folder), time.monotonic()
    named, manifest, progress = what(), None, ""
    if following:
        manifest = following.manifest
        progress = ": {:,} of its {:,} shards are finished".format(*following.finished())
    print(f"waiting for {named}{progress}", flush=True)
    lively, looked, known, said = begun, 0.0, _known(following), False
    interval = _LOOK_SECONDS[files.is_remote(folder)]
    while not ready():
        if stopping():
            return False
        now = time.monotonic()
        if now >= looked + interval:
            looked, alive = now, observer.alive()
            if alive or _known(following) != known:
                lively, known, said = now, _known(following), False
            elif alive is False and not said and now - begun > interval:
                said = True
                how_long = "" if timeout_seconds is None else f" for {timeout_seconds:,.0f} s"
                print(
                    f"no build is running in {folder}: {resume(folder, manifest)}; this run "
                    f"continues to wait{how_long}",
                    flush=True,
                )
        if timeout_seconds is not None and now - lively > timeout_seconds:
            raise UserError(
                f"nothing was built in {folder} for {timeout_seconds:,.0f} s while the run waited "
                f"for {named}: {resume(folder, manifest)}, then run this command again, which "
                "resumes (the limit is --data.follow_timeout_seconds)"
            )
        if following:
            following.pause()
        else:
            time.sleep(interval)
    print(f"went on after {time.monotonic() - begun:,.1f} s", flush=True)
    return True


def _known(following: Following | None) -> int:
    if following is None:
        return 0
    return len(following._read) + sum(map(len, following.manifest.splits.values()))


def folder_of(cache_dir: str, task: str) -> str | None:
    """Returns the folder of the finished or planned cache of `task`; None if there is none.

    It is `cache_dir` or `cache_dir/task`. Unlike `tasks.cache.cache.find_cache`, it ignores caches
    of other objectives, which would make the result depend on when a run begins.
    """
    folders = (cache_dir, files.join(cache_dir, task))
    return next(filter(_is_cache, folders), None)


def _is_cache(folder: str) -> bool:
    return any(files.exists(files.join(folder, name)) for name in (MANIFEST, PLAN))


def opened(folder: str, patient: bool = False) -> Following | CacheManifest | None:
    """Returns the manifest of a finished cache, a `Following` of an unfinished one, or None.

    If there is a plan, there is a vocabulary: it is written first. Raises UserError on damage.
    """
    if manifest := _finished(folder):
        return manifest
    plan = _planned(folder)
    return Following(folder, plan, patient) if plan else None


def find(
    cache_dir: str, task: str, relatives: Collection[str], patient: bool, timeout: float | None
) -> tuple[str, Following | CacheManifest] | None:
    """Finds the cache that serves `task`: (its folder, the result of `opened`), or None.

    If `patient`, waits for it, and prints caches of `relatives` that would also serve. Raises
    UserError as `opened` and `wait` do.
    """
    found: list[tuple[str, Following | CacheManifest]] = []

    def ready() -> bool:
        folder = folder_of(cache_dir, task)
        cache = opened(folder, patient) if folder else None
        if folder and cache:
            found.append((folder, cache))
        return bool(found)

    if ready() or not patient:
        return found[0] if found else None
    expected = files.join(cache_dir, task)
    for name in files.list_names(cache_dir) if cache_dir else ():
        if name in relatives and _is_cache(files.join(cache_dir, name)):
            print(
                f"{cache_dir} has {name}, for another objective on the same corpus: to follow it, "
                f"pass --cache_dir={files.join(cache_dir, name)}"
            )
    wait(expected, ready, lambda: f"the plan of {expected}", None, timeout)
    return found[0]


def _finished(folder: str) -> CacheManifest | None:
    """Returns the manifest; None if absent (a concurrent build may have removed it)."""
    path = files.join(folder, MANIFEST)
    try:
        return CacheManifest.load(folder) if files.exists(path) else None
    except (FileNotFoundError, UserError):
        if files.exists(path):
            raise
        return None


def _planned(folder: str) -> Plan | None:
    path = files.join(folder, PLAN)
    try:
        plan = plan_from_dict(files.read_json(path))
    except FileNotFoundError:
        return None
    except UserError as error:
        reason = str(error).removeprefix(f"{path} ").partition(": restore")[0]
        raise _unusable(path, reason) from error
    if not files.exists(files.join(folder, PLAN_MARK + plan.fingerprint)):
        raise _unusable(path, "its content was changed")
    return plan


def _unusable(path: str, reason: str) -> UserError:
    return UserError(
        f"{path} cannot be used ({reason}): if it is damaged, run the build's command again to "
        "restore it, then run this one again"
    )
