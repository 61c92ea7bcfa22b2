"""Faults of builds on one machine: kills, full disks, damaged or missing files, races."""

import contextlib
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from pipeline.faults.harness import CORPUS_FILES, Fault, Trial
from tasks.cache.manifest import MANIFEST, PLAN

KILLS_PER_TRIAL = 8
# Shares of the kills that hit one worker process alone, or the writing of the last files.
_WORKER_SHARE, _LAST_FILES_SHARE = 0.1, 0.1
# Share of the kills of a whole build that come before its first row, during imports.
_STARTUP_SHARE = 0.1


def faults(kills: int, others: int) -> list[Fault]:
    """Returns faults that make `kills` SIGKILLs in all, and `others` injections of each other."""
    workers = max(1, round(kills * _WORKER_SHARE))
    last_files = max(1, round(kills * _LAST_FILES_SHARE))
    return [
        Fault("SIGKILL of the build", kills - workers - last_files, _kill_build, KILLS_PER_TRIAL),
        Fault("SIGKILL of one worker", workers, _kill_worker),
        Fault("SIGKILL between the last files", last_files, _kill_between_last_files),
        Fault("disk full", others, _fill_disk),
        Fault("folder read-only", others, _make_read_only),
        Fault("finished file truncated", others, _truncate_file),
        Fault("finished file with a flipped bit", others, _flip_bit),
        Fault("corpus file missing", others, _remove_corpus_file),
        Fault("corpus file truncated", others, _truncate_corpus_file),
        Fault("second build in the same folder", others, _run_two_builds),
    ]


def _kill_build(trial: Trial) -> None:
    """Kills builds with their workers, most of them while rows are being written."""
    to_first_row, writing = trial.harness.seconds
    for _ in range(trial.injections):
        build = trial.start(trial.draw_workers())
        if trial.random.random() < _STARTUP_SHARE:
            time.sleep(trial.random.uniform(0, to_first_row))
        else:
            trial.wait_for_rows(build)
            time.sleep(trial.random.uniform(0, writing / 2))
        if not trial.kill(build):
            break  # the build finished first
    trial.rebuild_and_audit()


def _kill_worker(trial: Trial) -> None:
    """Kills one of several worker processes; the build must end by itself."""
    build = trial.start(trial.draw_workers(least=2))
    trial.wait_for_rows(build)
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "-g", str(build.pid)], capture_output=True, text=True
    ).stdout.splitlines()
    workers = [line for line in listed if "sdk_worker_main" in line and "sh -c" not in line]
    if workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(trial.random.choice(workers).split()[0]), signal.SIGKILL)
            trial.count_injection()
    trial.finish(build)
    trial.rebuild_and_audit()


def _kill_between_last_files(trial: Trial) -> None:
    """Kills a build between two of the files that complete the cache."""
    trial.copy_reference()
    cache = trial.cache
    names = sorted(path.name for path in [*cache.glob("info.*"), *cache.glob("stats.*")])
    names.append(MANIFEST)
    for name in [*names, "COMPLETED"]:
        (cache / name).unlink()
    awaited = cache / trial.random.choice(names)
    build = trial.start(1)
    trial.wait_for(build, awaited.exists)
    trial.kill(build)
    trial.rebuild_and_audit()


def _fill_disk(trial: Trial) -> None:
    """Builds where only part of the cache fits, then makes room."""
    size = sum(path.stat().st_size for path in trial.harness.reference.iterdir())
    room = int(size * trial.random.uniform(0.2, 0.8))
    with _mounted(trial.folder, f"size={room}") as remount:
        if remount:
            trial.outcome.note = "tmpfs too small"
            build = trial.start(trial.draw_workers())
        else:
            trial.outcome.note = "RLIMIT_FSIZE, as mounting is not permitted"
            shards = trial.harness.reference.glob("*.tfrecord-*")
            largest = max(path.stat().st_size for path in shards)
            limit = (largest // 2, largest // 2)
            build = trial.start(
                trial.draw_workers(),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
            )
        trial.wait_for_rows(build)
        trial.count_injection()
        trial.expect_failure(build)
        if remount:
            remount(f"size={4 * size}")
        trial.rebuild_and_audit()


def _make_read_only(trial: Trial) -> None:
    """Makes the folder of a finished cache read-only while one of its shards must be redone."""
    size = sum(path.stat().st_size for path in trial.harness.reference.iterdir())
    with _mounted(trial.folder, f"size={4 * size}") as remount:
        trial.copy_reference()
        trial.random.choice(sorted(trial.cache.glob("*.tfrecord-*"))).unlink()
        if remount:
            trial.outcome.note = "tmpfs mounted read-only"
            remount("ro")
        else:
            trial.outcome.note = "folder without write permission"
            trial.cache.chmod(0o500)
        trial.count_injection()
        trial.expect_failure(trial.start(trial.draw_workers()))
        if remount:
            remount("rw")
        else:
            trial.cache.chmod(0o700)
        trial.rebuild_and_audit()


def _truncate_file(trial: Trial) -> None:
    path = _any_file(trial)
    os.truncate(path, trial.random.randrange(path.stat().st_size))
    trial.count_injection()
    trial.rebuild_and_audit()


def _flip_bit(trial: Trial) -> None:
    path = _any_file(trial)
    data = bytearray(path.read_bytes())
    data[trial.random.randrange(len(data))] ^= 1 << trial.random.randrange(8)
    path.write_bytes(data)
    trial.count_injection()
    trial.rebuild_and_audit()


def _any_file(trial: Trial) -> pathlib.Path:
    """Returns a random file of a finished cache, or of one that lacks only its last two files.

    The plan.json of an unfinished cache is never chosen: no other file records what is being built.
    """
    trial.copy_reference()
    finished = trial.random.random() < 0.5
    if not finished:
        (trial.cache / "COMPLETED").unlink()
        (trial.cache / MANIFEST).unlink()
    paths = sorted(path for path in trial.cache.iterdir() if path.stat().st_size)
    return trial.random.choice([path for path in paths if finished or path.name != PLAN])


def _remove_corpus_file(trial: Trial) -> None:
    _damage_corpus(trial, lambda path: path.rename(path.with_suffix(".away")))


def _truncate_corpus_file(trial: Trial) -> None:
    _damage_corpus(trial, lambda path: os.truncate(path, path.stat().st_size // 50))


def _damage_corpus(trial: Trial, damage: Callable[[pathlib.Path], object]) -> None:
    """Damages a file of the corpus while it is read, and restores it for the next build."""
    trial.corpus = trial.folder / "corpus"
    shutil.copytree(trial.harness.corpus, trial.corpus)
    path = trial.corpus / f"part-{trial.random.randrange(CORPUS_FILES)}.jsonl"
    build = trial.start(trial.draw_workers())
    # Before the plan is written, this would simply be another corpus, with a cache of its own.
    trial.wait_for(build, (trial.cache / PLAN).exists)
    if trial.random.random() < 0.8:
        trial.wait_for_rows(build)
    damage(path)
    trial.count_injection()
    trial.finish(build)
    shutil.copy(trial.harness.corpus / path.name, path)
    trial.rebuild_and_audit()


def _run_two_builds(trial: Trial) -> None:
    """Starts a second build in the folder of a running one; the first must succeed."""
    first = trial.start(trial.draw_workers())
    trial.wait_for_rows(first)
    second = trial.launch(1)
    trial.count_injection()
    codes = (trial.finish(first), trial.finish(second))
    if codes[0]:
        trial.outcome.failures.append(f"the first of two builds ended with code {codes[0]}")
    trial.audit()


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
        yield lambda again: subprocess.run(
            ["mount", "-o", f"remount,{again}", str(folder)], check=True
        )
    finally:
        subprocess.run(["umount", str(folder)], check=True)
