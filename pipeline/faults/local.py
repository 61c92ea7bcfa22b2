"""Faults of builds on one machine: kills, full disks, damaged or missing files, races."""

import contextlib
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

from pipeline.faults import corpora, exclusion, filtering
from pipeline.faults.harness import CORPUS_FILES, Fault, Trial, checksums
from pipeline.faults.process_group import ModuleGroup
from tasks.cache.manifest import MANIFEST, PLAN, CacheManifest
from tasks.storage import files
from tasks.terminal.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError

KILLS_PER_TRIAL = 8
# Shares of the kills that hit one worker process alone, or the writing of the last files.
_WORKER_SHARE, _LAST_FILES_SHARE = 0.1, 0.1
# Share of the kills that hit a worker before anything is finished.
_EARLY_SHARE = 0.1
# The longest time from Ctrl-C, or the death of a worker, to the end of all processes.
_END_SECONDS = 60
_SMALL_FILES = 300
# Share of the kills of a whole build that come before its first row, during imports.
_STARTUP_SHARE = 0.1


def faults(kills: int, others: int, of_texts: bool = True) -> list[Fault]:
    """Returns faults that make `kills` SIGKILLs in all, and `others` injections of each other.

    `of_texts`: whether the corpus has texts, which can be filtered, and not pairs.
    """
    shares = (_WORKER_SHARE, _EARLY_SHARE, _LAST_FILES_SHARE)
    workers, early, last_files = (max(1, round(kills * share)) for share in shares)
    builds = kills - workers - early - last_files
    return [
        Fault("SIGKILL of the build", builds, _kill_build, KILLS_PER_TRIAL),
        Fault("SIGKILL of one worker", workers, _kill_worker),
        Fault("SIGKILL of a worker before the first shard", early, _kill_early_worker),
        Fault("SIGKILL between the last files", last_files, _kill_between_last_files),
        Fault("Ctrl-C, once or twice", 3 * others, _interrupt, KILLS_PER_TRIAL),
        Fault("Ctrl-C between the last files", others, _interrupt_between_last_files),
        Fault("disk full", others, _fill_disk),
        Fault("folder read-only", others, _make_read_only),
        Fault("finished file truncated", others, _truncate_file),
        Fault("finished file with a flipped bit", others, _flip_bit),
        Fault("plan.json of an unfinished cache damaged", others, _damage_plan),
        Fault("manifest edited", others, _edit_manifest),
        Fault("corpus file missing", others, _remove_corpus_file),
        Fault("corpus file truncated", others, _truncate_corpus_file),
        Fault("corpus of small files, build killed", others, _kill_with_small_files),
        Fault("corpus of symbolic links, build killed", others, _kill_with_links),
        Fault("second build in the same folder", others, _run_two_builds),
        *exclusion.faults(others),
        *(filtering.faults(others) if of_texts else ()),
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
    _kill_one_worker(trial, build)
    trial.rebuild_and_audit()


def _kill_early_worker(trial: Trial) -> None:
    """Kills a worker that has finished nothing, at best before it has reached the build."""
    build = trial.start(trial.draw_workers(least=2))
    trial.wait_for(build, lambda: len(_workers(build)) > 1)
    time.sleep(trial.random.uniform(0, 2))
    _kill_one_worker(trial, build)
    trial.rebuild_and_audit()


def _workers(build: ModuleGroup) -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "-g", str(build.pid)], capture_output=True, text=True
    ).stdout.splitlines()
    return [int(line.split()[0]) for line in listed if "sdk_worker_main" in line]


def _kill_one_worker(trial: Trial, build: ModuleGroup) -> None:
    """Kills a worker, if there is any; the build must end by itself, and leave no process."""
    if workers := _workers(build):
        with contextlib.suppress(ProcessLookupError):
            os.kill(trial.random.choice(workers), signal.SIGKILL)
            trial.count_injection()
    _expect_end(trial, build, (0, EXIT_USER_ERROR))


def _expect_end(trial: Trial, build: ModuleGroup, codes: tuple[int, ...]) -> None:
    """Waits for a build that must end soon, with one of `codes`, and leave no process."""
    begin = time.monotonic()
    code = trial.finish(build)
    seconds = time.monotonic() - begin
    if code not in codes:
        trial.fail(f"the build ended with code {code}: {build.log_tail()}")
    if seconds > _END_SECONDS:
        trial.fail(f"the build ended only after {seconds:.0f} s")
    if build.left(_END_SECONDS):
        trial.fail("the build has ended, and some of its processes have not")


def _interrupt(trial: Trial) -> None:
    """Interrupts builds at any moment, from their start on."""
    for _ in range(trial.injections):
        build = trial.start(trial.draw_workers())
        # Before that, Python is not yet running our program.
        time.sleep(trial.random.uniform(1, 1 + 2 * sum(trial.harness.seconds)))
        if not _send_interrupts(trial, build):
            break  # the build finished first
    trial.rebuild_and_audit()


def _send_interrupts(trial: Trial, build: ModuleGroup) -> bool:
    """Interrupts the build once or twice; returns False if it had ended by itself."""
    if not build.running:
        trial.finish(build)
        return False
    build.signal(signal.SIGINT)
    trial.count_injection()
    if trial.random.random() < 0.5:
        time.sleep(trial.random.uniform(0, 0.5))
        build.signal(signal.SIGINT)
    # Python's own code if the second one arrives when it shuts down; 0 if the first one did.
    _expect_end(trial, build, (EXIT_INTERRUPTED, -signal.SIGINT, 0))
    return True


def _kill_between_last_files(trial: Trial) -> None:
    """Kills a build between two of the files that complete the cache."""
    trial.kill(_build_of_last_files(trial))
    trial.rebuild_and_audit()


def _interrupt_between_last_files(trial: Trial) -> None:
    _send_interrupts(trial, _build_of_last_files(trial))
    trial.rebuild_and_audit()


def _build_of_last_files(trial: Trial) -> ModuleGroup:
    """Starts a build that has only the last files to write, and waits for one of them."""
    trial.copy_reference()
    cache = trial.cache
    names = sorted(path.name for path in [*cache.glob("info.*"), *cache.glob("stats.*")])
    names.append(MANIFEST)
    for name in [*names, "COMPLETED"]:
        (cache / name).unlink()
    awaited = cache / trial.random.choice(names)
    build = trial.start(1)
    trial.wait_for(build, awaited.exists)
    return build


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
    """Returns a random file of a finished cache, or of one that lacks only its last two files."""
    trial.copy_reference()
    if trial.random.random() < 0.5:
        (trial.cache / "COMPLETED").unlink()
        (trial.cache / MANIFEST).unlink()
    return trial.random.choice(
        sorted(path for path in trial.cache.iterdir() if path.stat().st_size)
    )


def _damage_plan(trial: Trial) -> None:
    """Damages the plan of a cache that lacks some shards; the others must be kept."""
    trial.copy_reference()
    (trial.cache / "COMPLETED").unlink()
    (trial.cache / MANIFEST).unlink()
    receipts = sorted(trial.cache.glob("*.receipt-*"))
    for path in trial.random.sample(receipts, len(receipts) // 2):
        path.unlink()
    path = trial.cache / PLAN
    text = path.read_text()
    if trial.random.random() < 0.5:
        os.truncate(path, trial.random.randrange(len(text)))
    else:
        place = trial.random.choice([place for place, each in enumerate(text) if each == '"'])
        path.write_text(text[: place + 1] + "~" + text[place + 2 :])
    trial.count_injection()
    trial.rebuild_and_audit()


def _edit_manifest(trial: Trial) -> None:
    """Edits a finished cache's manifest; it must be refused, and written anew."""
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
    try:
        CacheManifest.load(str(trial.cache))
    except UserError:
        pass
    else:
        trial.fail("the edited manifest was read without a word")
    trial.rebuild_and_audit()


def _kill_with_small_files(trial: Trial) -> None:
    """Kills a build of many small files that hold the documents of the reference."""
    trial.corpus = trial.folder / "corpus"
    trial.harness.write_corpus(trial.corpus, _SMALL_FILES)
    build = trial.start(1)
    if trial.finish(build):
        trial.fail(f"the build without faults failed: {build.log_tail()}")
        return
    trial.expected = checksums(trial.cache)
    shutil.rmtree(trial.cache)
    _kill_while_writing(trial)


def _kill_with_links(trial: Trial) -> None:
    """Kills a build of the reference's corpus whose files are symbolic links, as on the Hub."""
    trial.corpus = trial.folder / "corpus"
    trial.corpus.mkdir(parents=True)
    for path in trial.harness.corpus.iterdir():
        (trial.corpus / path.name).symlink_to(path)
    _kill_while_writing(trial)


def _kill_while_writing(trial: Trial) -> None:
    build = trial.start(trial.draw_workers())
    trial.wait_for_rows(build)
    time.sleep(trial.random.uniform(0, trial.harness.seconds[1] / 2))
    if not trial.kill(build):
        trial.count_injection()  # too late, and the trial still tells whether all is there
    trial.rebuild_and_audit()


def _remove_corpus_file(trial: Trial) -> None:
    _damage_corpus(trial, lambda path: path.rename(path.with_name("away")))


def _truncate_corpus_file(trial: Trial) -> None:
    _damage_corpus(trial, lambda path: os.truncate(path, path.stat().st_size // 50))


def _damage_corpus(trial: Trial, damage: Callable[[pathlib.Path], object]) -> None:
    """Damages a file of the corpus while it is read, and restores it for the next build."""
    trial.corpus = trial.folder / "corpus"
    shutil.copytree(trial.harness.corpus, trial.corpus)
    number = trial.random.randrange(CORPUS_FILES)
    path = trial.corpus / corpora.file_name(trial.harness.flags.format, number)
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
