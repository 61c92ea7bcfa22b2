"""Faults of builds on one machine: kills, full disks, damaged or missing files, races."""

import contextlib
import functools
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tasks.cache.manifest import MANIFEST, PLAN, CacheManifest
from tasks.storage import files
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError
from tests.faults.builds import CORPUS_FILES, KILLS_PER_TRIAL, Fault, Snapshot, Trial
from tests.faults.command import Command
from tests.support import corpora
from tests.support.damage import any_file, damage
from tests.support.processes import workers_of

# Share of the kills that hit one worker process, of those that hit a worker before anything is
# finished, and of those that hit the writing of the last files.
_SHARE = 0.1
# Share of the kills of a whole build that come before its first row, during imports.
_STARTUP_SHARE = 0.1
_SMALL_FILES = 300
_FILTERS = [
    "--filter=gopher_quality?min_words=8&min_stop_words=1",
    "--filter=pii",
    "--filter=c4?min_sentences=1&min_line_words=3",
]
LIST = "exclude.arrow"
_LISTED = 20  # documents of the text file of ids


def faults(kills: int, others: int, of_texts: bool = True) -> list[Fault]:
    """Returns faults that make `kills` SIGKILLs in all, and `others` injections of each other."""
    few = max(1, round(kills * _SHARE))
    any_moment = functools.partial(_Breaking, _reach_any_moment)
    last_file = functools.partial(_Breaking, _reach_a_last_file, prepare=_remove_last_files)
    some_rows = functools.partial(_Breaking, _reach_half, _kill_or_late)
    often = [
        Fault("SIGKILL of the build", kills - 3 * few, any_moment(), KILLS_PER_TRIAL),
        Fault("SIGKILL of one worker", few, _Breaking(Trial.reach_rows, _kill_worker, least=2)),
        Fault(
            "SIGKILL of a worker before the first shard",
            few,
            _Breaking(_reach_workers, _kill_worker, least=2),
        ),
        Fault("SIGKILL between the last files", few, last_file()),
        Fault(
            "Ctrl-C, once or twice",
            3 * others,
            _Breaking(_reach_any_second, _interrupt),
            KILLS_PER_TRIAL,
        ),
    ]
    once: dict[str, Callable[[Trial], None]] = {
        "Ctrl-C between the last files": last_file(_interrupt),
        "disk full": _fill_disk,
        "folder read-only": _make_read_only,
        "finished file truncated": functools.partial(_damage_file, kind="cut"),
        "finished file with a flipped bit": functools.partial(_damage_file, kind="bit"),
        "plan.json of an unfinished cache damaged": _damage_plan,
        "manifest edited": _edit_manifest,
        "corpus file missing": functools.partial(_damage_corpus, change=pathlib.Path.unlink),
        "corpus file truncated": functools.partial(_damage_corpus, change=_truncate),
        "corpus of small files, build killed": some_rows(_use_small_files),
        "corpus of symbolic links, build killed": some_rows(_use_links),
        "second build in the same folder": _run_two_builds,
    }
    thrice: dict[str, Callable[[Trial], None]] = {
        "search for duplicates killed": _kill_search,
        "build with exclude lists killed": any_moment(_kill_or_late, _exclude),
        "takedown killed": any_moment(_kill_or_late, _take_down),
    }
    if of_texts:
        thrice["build with filters killed"] = any_moment(_kill_or_late, _filter)
    return [
        *often,
        *(Fault(name, others, inject) for name, inject in once.items()),
        *(Fault(name, 3 * others, inject, 3) for name, inject in thrice.items()),
    ]


class _Breaking(NamedTuple):
    """A fault that ends builds, and then lets the same command finish; `prepare` comes first."""

    reach: Callable[[Trial], object]
    strike: Callable[[Trial], bool] = Trial.kill
    prepare: Callable[[Trial], object] = lambda trial: None
    least: int = 1

    def __call__(self, trial: Trial) -> None:
        self.prepare(trial)
        trial.break_and_audit(self.reach, self.strike, self.least)


# --- moments


def _reach_any_moment(trial: Trial) -> None:
    """Waits for a moment at the start, or more often while rows are written."""
    if trial.random.random() < _STARTUP_SHARE:
        time.sleep(trial.random.uniform(0, trial.lab.seconds[0]))
    else:
        _reach_half(trial)


def _reach_half(trial: Trial) -> None:
    trial.reach_rows()
    time.sleep(trial.random.uniform(0, trial.lab.seconds[1] / 2))


def _reach_any_second(trial: Trial) -> None:
    time.sleep(trial.random.uniform(1, 1 + 2 * sum(trial.lab.seconds)))


def _reach_workers(trial: Trial) -> None:
    """Waits for several workers, at best before they have reached the build."""
    trial.command.wait_until(lambda: len(workers_of(trial.command.pid)) > 1)
    time.sleep(trial.random.uniform(0, 2))


def _reach_a_last_file(trial: Trial) -> None:
    """Waits for one of the files that complete the cache."""
    awaited = trial.cache / trial.random.choice(_last_files(trial)[:-1])
    trial.command.wait_until(awaited.exists)


# --- ends of builds


def _kill_or_late(trial: Trial) -> bool:
    """Kills a build; one that has finished first counts, and still tells whether all is there."""
    if not trial.kill():
        trial.count_injection()
    return True


def _kill_worker(trial: Trial) -> bool:
    if workers := workers_of(trial.command.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(trial.random.choice(workers), signal.SIGKILL)
            trial.count_injection()
    trial.command.expect_end(0, EXIT_USER_ERROR)
    trial.finish()
    return True


def _interrupt(trial: Trial) -> bool:
    """Interrupts the build once or twice; returns False if it had ended by itself."""
    build = trial.command
    running = build.running
    if running:
        build.send(signal.SIGINT)
        trial.count_injection()
        if trial.random.random() < 0.5:
            time.sleep(trial.random.uniform(0, 0.5))
            build.send(signal.SIGINT)
        build.check_end(signal.SIGINT)
    trial.finish()
    return running


# --- caches


def _last_files(trial: Trial) -> list[str]:
    reference = trial.lab.reference
    paths = [*reference.glob("info.*"), *reference.glob("stats.*")]
    return [*sorted(path.name for path in paths), MANIFEST, "COMPLETED"]


def _remove_last_files(trial: Trial) -> None:
    trial.copy_reference(*_last_files(trial))


def _fill_disk(trial: Trial) -> None:
    """Builds where only part of the cache fits, then makes room."""
    size = sum(path.stat().st_size for path in trial.lab.reference.iterdir())
    room = int(size * trial.random.uniform(0.2, 0.8))
    with _mounted(trial.folder, f"size={room}") as remount:
        if remount:
            trial.outcome.note = "tmpfs too small"
            trial.start()
        else:
            trial.outcome.note = "RLIMIT_FSIZE, as mounting is not permitted"
            shards = trial.lab.reference.glob("*.tfrecord-*")
            half = max(path.stat().st_size for path in shards) // 2
            limit = (half, half)
            trial.start(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        trial.reach_rows()
        trial.count_injection()
        trial.expect_failure()
        if remount:
            remount(f"size={4 * size}")
        trial.rebuild_and_audit()


def _make_read_only(trial: Trial) -> None:
    """Makes the folder of a finished cache read-only while one of its shards must be redone."""
    size = sum(path.stat().st_size for path in trial.lab.reference.iterdir())
    with _mounted(trial.folder, f"size={4 * size}") as remount:
        trial.copy_reference()
        trial.random.choice(sorted(trial.cache.glob("*.tfrecord-*"))).unlink()
        trial.outcome.note = "tmpfs mounted read-only" if remount else "folder without permission"
        remount("ro") if remount else trial.cache.chmod(0o500)
        trial.count_injection()
        trial.start()
        trial.expect_failure()
        remount("rw") if remount else trial.cache.chmod(0o700)
        trial.rebuild_and_audit()


def _damage_file(trial: Trial, kind: str) -> None:
    trial.copy_reference(*(("COMPLETED", MANIFEST) if trial.random.random() < 0.5 else ()))
    damage(any_file(trial.cache, trial.random), kind, trial.random)
    trial.count_injection()
    trial.rebuild_and_audit()


def _damage_plan(trial: Trial) -> None:
    """Damages the plan of a cache that lacks some shards; the others must be kept."""
    trial.copy_reference("COMPLETED", MANIFEST)
    receipts = sorted(trial.cache.glob("*.receipt-*"))
    for path in trial.random.sample(receipts, len(receipts) // 2):
        path.unlink()
    path = trial.cache / PLAN
    if trial.random.random() < 0.5:
        damage(path, "cut", trial.random)
    else:
        text = path.read_text()
        place = trial.random.choice([place for place, each in enumerate(text) if each == '"'])
        path.write_text(text[: place + 1] + "~" + text[place + 2 :])
    trial.count_injection()
    trial.rebuild_and_audit()


def _edit_manifest(trial: Trial) -> None:
    """Edits a finished cache's manifest, which must be refused, and rewritten."""
    trial.copy_reference()
    path = trial.cache / MANIFEST
    value = json.loads(path.read_text())
    plan, shards = value["plan"], value["splits"]["train"]
    edits: list[Callable[[], object]] = [
        lambda: plan.update(packing="unknown"),
        lambda: plan.update(separator="unknown"),
        lambda: plan.update(row_tokens=-1),
        lambda: plan["shards"].update(train=1),
        lambda: plan.pop("vocabulary"),
        lambda: shards.reverse(),
        lambda: shards.pop(),
        lambda: shards.append(shards[0]),
        lambda: shards[0].update(tokens=-shards[0]["tokens"]),
        lambda: shards[0].update(rows=shards[0]["rows"] + 1),
        lambda: shards[0].update(rows=str(shards[0]["rows"])),
        lambda: shards[0].pop("files"),
    ]
    trial.random.choice(edits)()
    files.write_json(str(path), value)
    trial.count_injection()
    with contextlib.suppress(UserError):
        CacheManifest.load(str(trial.cache))
        trial.outcome.failures.append("the edited manifest was read without a word")
    trial.rebuild_and_audit()


def _run_two_builds(trial: Trial) -> None:
    """Starts a second build in the folder of a running one; the first must succeed."""
    first = trial.start()
    trial.reach_rows()
    second = trial.launch(1)
    trial.count_injection()
    trial.command = first
    if trial.finish():
        raise UserError(f"the first of two builds failed: {first.tail()}")
    second.wait()
    trial.audit()


# --- corpora


def _use_small_files(trial: Trial) -> None:
    """Gives the trial many small files that hold the documents of the reference."""
    trial.corpus = trial.folder / "corpus"
    trial.lab.write_corpus(trial.corpus, _SMALL_FILES)
    trial.launch(1).finish()
    trial.wanted = Snapshot(Snapshot.of(trial.cache).checksums, trial.lab.wanted.documents)
    shutil.rmtree(trial.cache)


def _use_links(trial: Trial) -> None:
    trial.corpus = trial.folder / "corpus"
    trial.corpus.mkdir(parents=True)
    for path in trial.lab.corpus.iterdir():
        (trial.corpus / path.name).symlink_to(path)


def _damage_corpus(trial: Trial, change: Callable[[pathlib.Path], object]) -> None:
    """Damages a file of the corpus while it is read, and restores it for the next build."""
    trial.corpus = trial.folder / "corpus"
    shutil.copytree(trial.lab.corpus, trial.corpus)
    number = trial.random.randrange(CORPUS_FILES)
    path = trial.corpus / corpora.file_name(trial.lab.flags.format, number)
    build = trial.start()
    # Before the plan is written, this would simply be another corpus, with a cache of its own.
    build.wait_until((trial.cache / PLAN).exists)
    if trial.random.random() < 0.8:
        trial.reach_rows()
    change(path)
    trial.count_injection()
    trial.finish()
    shutil.copy(trial.lab.corpus / path.name, path)
    trial.rebuild_and_audit()


def _truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 50)


# --- searches for duplicates, exclude lists, filters


class _Search(NamedTuple):
    """A search for duplicates that nothing disturbed, and what a build makes of its list."""

    exclude: str
    sha256: str
    wanted: Snapshot
    seconds: float


def _start_search(trial: Trial, workers: int) -> Command:
    lab = trial.lab
    spec = corpora.spec(lab.flags.format, str(trial.corpus)) + lab.sides
    module = [
        *(
            "pipeline.annexes.deduplication.dedup",
            f"--output={trial.folder / 'search'}",
            "--rows=4",
        ),
        *(f"--shard_bytes={lab.flags.shard_bytes}", f"--corpus={spec.rstrip('?&')}"),
    ]
    return trial.launch(workers, Command("a search", module, trial.log))


def _undisturbed(trial: Trial) -> _Search:
    trial.folder.mkdir()
    begin = time.monotonic()
    _start_search(trial, 1).finish()
    seconds = time.monotonic() - begin
    path, listed = trial.folder / "search" / LIST, trial.folder / "ids.txt"
    ids = sorted({name for _, name, *_ in trial.lab.wanted.documents})
    chosen = random.Random(trial.lab.flags.seed).sample(ids, min(_LISTED, len(ids)))
    listed.write_text("\n".join(chosen))
    trial.flags = [f"--exclude={path},{listed}"]
    trial.launch(1).finish()
    trial.lab.check_accounts(trial.cache)
    return _Search(*trial.flags, files.sha256(str(path)), Snapshot.of(trial.cache), seconds)


def _kill_search(trial: Trial) -> None:
    """Kills searches at any moment, with any number of workers; the list must be the same."""
    undisturbed = trial.lab.made("without", _undisturbed)
    trial.folder.mkdir(exist_ok=True)
    search = trial.folder / "search"
    for _ in range(trial.injections):
        command = _start_search(trial, trial.draw_workers())
        if trial.random.random() < _STARTUP_SHARE:
            time.sleep(trial.random.uniform(0, undisturbed.seconds / 2))
        else:
            command.wait_until(lambda: any(search.glob("*.arrays")))
            time.sleep(trial.random.uniform(0, undisturbed.seconds / 4))
        _kill_or_late(trial)
    _start_search(trial, trial.draw_workers()).finish()
    trial.outcome.counts["caches"] += 1
    left = sorted(each.name for each in search.iterdir())
    if left != [LIST, "plan.json", "report.json"]:
        raise UserError(f"{search} holds {', '.join(left)}")
    if files.sha256(str(search / LIST)) != undisturbed.sha256:
        raise UserError(f"{search / LIST} differs")
    trial.outcome.counts["equal"] += 1
    shutil.rmtree(search)


def _exclude(trial: Trial) -> None:
    undisturbed = trial.lab.made("without", _undisturbed)
    trial.flags, trial.wanted = [undisturbed.exclude], undisturbed.wanted


def _take_down(trial: Trial) -> None:
    trial.copy_reference()
    _exclude(trial)


def _filter(trial: Trial) -> None:
    trial.flags, trial.wanted = _FILTERS, trial.lab.made("filtered", _filtered)


def _filtered(trial: Trial) -> Snapshot:
    trial.flags = _FILTERS
    trial.launch(1).finish()
    trial.lab.check_accounts(trial.cache)
    found = Snapshot.of(trial.cache)
    if not trial.lab.wanted.documents - found.documents:
        raise UserError("the filters drop nothing of this corpus: choose another for this test")
    return found


@contextlib.contextmanager
def _mounted(folder: pathlib.Path, options: str) -> Iterator[Callable[[str], object] | None]:
    """Mounts a small tmpfs at `folder`, and yields a function that remounts it with new options.

    Yields None, with nothing mounted, where mounting is not permitted.
    """
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(mount).returncode:
        yield None
        return
    try:
        again = ["mount", "-o"]
        yield lambda new: subprocess.run([*again, f"remount,{new}", str(folder)], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
