"""Faults of builds: full disks, damaged files, dead workers, races, kills at bad moments.

Each is injected into builds of a drawn trial's corpus in a folder of their own, or into a copy of
its caches. The same command must then end with the files of the undisturbed build.
"""

import contextlib
import functools
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tasks import annexes
from tasks.cache.manifest import MANIFEST, PLAN, CacheManifest
from tasks.storage import files
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError
from tests.laboratory.commands import Command, Difference, draw_kills
from tests.laboratory.comparing import cache_differences
from tests.support.damage import any_file, damage
from tests.support.processes import workers_of

if TYPE_CHECKING:
    from tests.laboratory.build_command import Build
    from tests.laboratory.builds import Trial

_LAST = ("info.*", "stats.*", MANIFEST, "COMPLETED")  # what completes a cache, in its order
_FILTERS = (
    "--filter=gopher_quality?min_words=8&min_stop_words=1",
    "--filter=pii",
    "--filter=c4?min_sentences=1&min_line_words=3",
)


def _path(trial: "Trial", side: str = "f") -> pathlib.Path:
    return trial.folder / "caches" / side


def _copied(trial: "Trial", *without: str) -> pathlib.Path:
    """Copies the undisturbed caches, `without` some files; returns one of the copies."""
    shutil.copytree(_path(trial, "a"), _path(trial), dirs_exist_ok=True)
    for pattern in without:
        for path in _path(trial).glob(f"*/{pattern}"):
            path.unlink()
    return _path(trial) / trial.random.choice([*trial.wanted()])


def _build(trial: "Trial", **how) -> "Build":
    return trial.build("f", exclude=trial.excluding(), **how)


def _mend(trial: "Trial", what: str) -> None:
    """Builds once more by the same command, and compares the caches with the undisturbed."""
    _build(trial).succeed()
    trial.same("a", "f", what)
    trial.verify("f")
    for path in _path(trial).iterdir():  # the folder itself may be a mount
        shutil.rmtree(path)


# --- files of the cache


def _damage_file(trial: "Trial", kind: str) -> None:
    cache = _copied(trial, *(("COMPLETED", MANIFEST) if trial.random.random() < 0.5 else ()))
    path = any_file(cache, trial.random)
    damage(path, kind, trial.random)
    _mend(trial, f"{kind} in {path.name}")


def _damage_plan(trial: "Trial") -> None:
    """Damages the plan of a cache that lacks some shards; the others must be kept."""
    cache = _copied(trial, "COMPLETED", MANIFEST)
    receipts = sorted(cache.glob("*.receipt-*"))
    for path in trial.random.sample(receipts, len(receipts) // 2):
        path.unlink()
    path = cache / PLAN
    if trial.random.random() < 0.5:
        damage(path, "cut", trial.random)
    else:
        text = path.read_text()
        # The task's name is no part of the fingerprint that tells a damaged plan from another one.
        name = f'"{cache.name}"'
        quotes = [place for place, character in enumerate(text) if character == '"']
        place = trial.random.choice([each for each in quotes if not text.startswith(name, each)])
        path.write_text(text[: place + 1] + "~" + text[place + 2 :])
    _mend(trial, "a damaged plan")


def _edit_manifest(trial: "Trial") -> None:
    """Edits a finished cache's manifest, which must be refused, and rewritten."""
    path = _copied(trial) / MANIFEST
    text = path.read_text()
    value = json.loads(text)
    plan, shards = value["plan"], value["splits"]["train"]
    edits: list[Callable[[], object]] = [
        lambda: plan.update(packing="unknown"),
        lambda: plan.update(separator="unknown"),
        lambda: plan.update(row_tokens=-1),
        lambda: plan["shards"].update(train=len(shards) + 1),
        lambda: plan.pop("vocabulary"),
        lambda: shards[0].update(tokens=-1 - shards[0]["tokens"]),
        lambda: shards[0].update(rows=shards[0]["rows"] + 1),
        lambda: shards[0].update(rows=str(shards[0]["rows"])),
        lambda: shards[0].pop("files"),
        lambda: shards.pop(),
        lambda: shards.append(shards[0]),
    ]
    trial.random.choice([*edits, *[shards.reverse] * (len(shards) > 1)])()
    files.write_json(str(path), value)
    with contextlib.suppress(UserError):
        CacheManifest.load(str(path.parent))
        raise Difference("the edited manifest was read without a word")
    _mend(trial, "an edited manifest")


def _fill_disk(trial: "Trial") -> str:
    """Builds where only part of the cache fits, then makes room."""
    paths = [path for path in _path(trial, "a").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    with mounted(_path(trial), f"size={int(size * trial.random.uniform(0.2, 0.8))}") as remount:
        half = max(path.stat().st_size for path in paths if "tfrecord" in path.name) // 2
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (half, half))
        if not _build(trial, prepare=None if remount else limit).run().code:
            raise Difference("a build on a full disk reports success")
        if remount:
            remount("size=256m")
        _mend(trial, "a full disk")
    return f"disk full ({'tmpfs' if remount else 'RLIMIT_FSIZE, as mounting is not permitted'})"


def _make_read_only(trial: "Trial") -> str:
    """Makes the folder of a finished cache read-only while one of its shards must be redone."""
    with mounted(_path(trial), "size=256m") as remount:
        if not remount and not os.geteuid():
            shutil.rmtree(_path(trial))
            return "folder read-only: not tried, as root cannot mount here"
        cache = _copied(trial)
        trial.random.choice(sorted(cache.glob("*.tfrecord-*"))).unlink()
        remount("ro") if remount else cache.chmod(0o500)
        if not _build(trial).run().code:
            raise Difference("a build in a read-only folder reports success")
        remount("rw") if remount else cache.chmod(0o700)
        _mend(trial, "a read-only folder")
    return f"folder read-only ({'tmpfs' if remount else 'permissions'})"


@contextlib.contextmanager
def mounted(folder: pathlib.Path, options: str) -> Iterator[Callable[[str], object] | None]:
    """Mounts a small tmpfs above `folder`, and yields a function that remounts it.

    Yields None, with nothing mounted, where mounting is not permitted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    permitted = not os.geteuid() and shutil.which("mount")
    if not permitted or subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        again = ["mount", "-o"]
        yield lambda new: subprocess.run([*again, f"remount,{new}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# --- the corpus


def _damage_corpus(trial: "Trial", change: Callable[[pathlib.Path], object]) -> None:
    """Damages a file of the corpus while it is read, and restores it for the next build."""
    path = any_file(trial.folder / "corpus", trial.random)
    data, build = path.read_bytes(), _build(trial).start()
    # Before the plan is written, this would simply be another corpus, with a cache of its own.
    build.wait_until(build.is_planned)
    if trial.random.random() < 0.8:
        build.wait_until(build.is_writing)
    change(path)
    build.wait()
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    _mend(trial, "a damaged corpus")


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 50)


# --- moments of a build that takes seconds


def _kill_worker(trial: "Trial", early: bool) -> None:
    """Kills one of several workers, at best before the first shard, or while rows are written."""
    build = _build(trial, least=2).start()
    build.wait_until(lambda: len(workers_of(build.pid)) > 1 if early else build.is_writing())
    time.sleep(trial.random.uniform(0, 2 if early else 0.2))
    if workers := workers_of(build.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(trial.random.choice(workers), signal.SIGKILL)
    if build.wait().code not in (0, EXIT_USER_ERROR):
        raise Difference(f"a build without one worker ended with {build.exit_code}")
    build.check_group()
    _mend(trial, "a dead worker")


def _end_between_last_files(trial: "Trial", number: signal.Signals) -> None:
    _copied(trial, *_LAST)
    build, awaited = _build(trial).start(), trial.random.choice(_LAST[:-1])
    build.wait_until(lambda: any(build.cache.glob(f"*/{awaited}")))
    build.end(number)
    _mend(trial, f"{number.name} between the last files")


def _interrupt(trial: "Trial") -> None:
    """Interrupts builds of one cache once or twice each."""
    for _ in range(3):
        build = _build(trial).start()
        time.sleep(trial.random.uniform(1, 1 + 2 * trial.seconds))
        build.send(signal.SIGINT)
        if trial.random.random() < 0.5:
            time.sleep(trial.random.uniform(0, 0.5))
            build.send(signal.SIGINT)
        build.check_end(signal.SIGINT)
    _mend(trial, "Ctrl-C")


def _run_two_builds(trial: "Trial") -> None:
    """Starts a second build in the folder of a running one; the first must succeed."""
    first = _build(trial).start()
    first.wait_until(first.is_writing)
    second = _build(trial).start()
    first.finish()
    second.wait()
    _mend(trial, "two builds")


# --- filters that edit texts, searches for duplicates


def _filter(trial: "Trial") -> str | None:
    """Kills builds with filters; each document must be kept or left out once."""
    if not annexes.entries("filters"):
        return "build with filters: not tried without the annex"
    exclude = trial.excluding()
    plain = trial.build("g", *_FILTERS, exclude=exclude).succeed()
    kills = draw_kills(trial.random, plain, 3)
    trial.build("f", *_FILTERS, exclude=exclude).disturb(kills)
    trial.same("g", "f", "filtered and killed")
    if not trial.splits_pairs:
        trial.check_accounts("g")
    for side in "fg":
        shutil.rmtree(_path(trial, side))
    return None


def _search(trial: "Trial") -> str:
    """Kills searches for duplicates, builds without what they list, and takedowns of it."""
    module = annexes.entries("commands.caches").get("dedup")
    if not module or len(trial.specs) > 1:
        return "search for duplicates: not tried with several languages, or without the annex"

    def search(name: str) -> Command:
        words = [f"--output={trial.folder / name}", "--rows=4", f"--corpus={trial.specs[0]}"]
        words.append(f"--shard_bytes={trial.shard_bytes}")
        return trial.command(module, *words, f"--workers={trial.workers()}")

    kills = draw_kills(trial.random, search("search").succeed(), 3)
    search("again").disturb(kills)
    folders = [trial.folder / name for name in ("search", "again")]
    if found := cache_differences(*folders, without=("report.json",)):  # has the times
        raise Difference(f"searches for duplicates differ in {found}")
    exclude = [",".join([f"--exclude={folders[0]}/exclude.arrow", *map(str, trial.lists)])]
    plain = trial.build("g", exclude=exclude).succeed()
    trial.build("f", exclude=exclude).disturb(draw_kills(trial.random, plain, 3))
    trial.same("g", "f", "left out and killed")
    shutil.rmtree(_path(trial))
    _copied(trial)
    trial.build("f", exclude=exclude).disturb(draw_kills(trial.random, plain, 3))
    trial.same("g", "f", "taken down and killed", hidden=False)
    for path in (_path(trial), _path(trial, "g"), *folders):
        shutil.rmtree(path)
    return "search for duplicates, build with its list and takedown killed"


_Fault = Callable[["Trial"], str | None]
# Name -> what injects the fault, and may return another name.
OF_FILES: dict[str, _Fault] = {
    "disk full": _fill_disk,
    "folder read-only": _make_read_only,
    "finished file truncated": functools.partial(_damage_file, kind="cut"),
    "finished file with a flipped bit": functools.partial(_damage_file, kind="bit"),
    "plan.json of an unfinished cache damaged": _damage_plan,
    "manifest edited": _edit_manifest,
    "corpus file missing": functools.partial(_damage_corpus, change=pathlib.Path.unlink),
    "corpus file truncated": functools.partial(_damage_corpus, change=_truncate),
}
EVERY: dict[str, _Fault] = {
    **OF_FILES,
    "SIGKILL of one worker": functools.partial(_kill_worker, early=False),
    "SIGKILL of a worker before the first shard": functools.partial(_kill_worker, early=True),
    "SIGKILL between the last files": functools.partial(
        _end_between_last_files, number=signal.SIGKILL
    ),
    "Ctrl-C between the last files": functools.partial(
        _end_between_last_files, number=signal.SIGINT
    ),
    "3 builds interrupted, once or twice": _interrupt,
    "second build in the same folder": _run_two_builds,
    "build with filters killed": _filter,
    "search for duplicates killed": _search,
}
