"""Builds in parts: processes that share a folder, in any order, twice, and killed."""

import contextlib
import random
import shutil
import signal
import sys
import time
from collections import Counter

import pytest

from pipeline import build as command
from pipeline.building import engine
from pipeline.runners import local_workers
from pipeline.verification.cache import verify
from tasks.storage import files, lock
from tasks.terminal.command_line import UserError
from tests.support.damage import damage
from tests.support.processes import launched
from tests.support.servers.gcs import GcsServer

TASK = "python_docs_span_corruption"
# Many pieces, so that all parts have some.
PIECES = "--shard_bytes=100000"


@pytest.fixture(scope="module")
def wanted(build, checksums, tmp_path_factory) -> dict[str, str]:
    """Returns the checksums of a cache that one process built."""
    return checksums(build(tmp_path_factory.mktemp("whole"), PIECES))


@pytest.fixture
def part(build, tmp_path):
    """Returns a function that builds a part in this process, and returns the cache's folder."""
    return lambda name, *more: build(tmp_path, PIECES, f"--part={name}", *more)


@pytest.mark.parametrize("names", [("3/4", "1/4", "4/4", "2/4"), ("0/3", "1/3", "2/3"), ("1/1",)])
def test_the_last_part_completes_the_same_cache(part, wanted, checksums, capsys, names):
    *others, last = names
    for name in others:
        folder = part(name)
        assert "next: " not in capsys.readouterr().out
        assert not (folder / "manifest.json").exists()
    folder = part(last)
    assert "next: python -m trainer.pretrain" in capsys.readouterr().out
    assert checksums(folder) == wanted


def test_parts_that_have_not_finished_are_named(part, capsys, tmp_path):
    folder = part("2/4")
    said = capsys.readouterr().out
    for line in (
        f"part 2 of 4 is finished; the last part to finish completes {folder}\n",
        "part 1 of 4 has not run: 3 of its 3 pieces are missing\n",
        "part 4 of 4, or 0 of 4, has not run: 3 of its 3 pieces are missing\n",
    ):
        assert line in said
    (folder / "train.receipt-00002-of-00011.json").unlink()  # of a part that was killed
    with lock.held(str(folder), "build", "--cache_dir", "4-of-4", shared=True):
        part("1/4")
    said = capsys.readouterr().out
    assert "part 2 of 4 has stopped: 1 of its 3 pieces are missing" in said
    assert "part 4 of 4, or 0 of 4, is running (part 4 of 4, process " in said
    assert "part 1 of 4 is finished" in said
    capsys.readouterr()
    part("1/100")
    assert "… and 1 more" in capsys.readouterr().out


def test_a_part_that_comes_again_changes_nothing(part, wanted, checksums, capsys):
    for name in ("1/2", "2/2"):
        folder = part(name)
    manifest = (folder / "manifest.json").stat()
    with lock.held(str(folder), "build", "--cache_dir", "1-of-3", shared=True):
        assert not verify(str(folder))[1]
    for name in ("1/2", "3/4", "0/2"):  # also as a part of another number of parts
        capsys.readouterr()
        part(name)
        assert "is complete and valid: nothing to do" in capsys.readouterr().out
    assert (folder / "manifest.json").stat().st_mtime_ns == manifest.st_mtime_ns
    assert checksums(folder) == wanted


def test_a_damaged_shard_is_redone_by_its_part(part, wanted, checksums, capsys):
    for name in ("1/2", "2/2"):
        folder = part(name)
    damage(folder / "train.tfrecord-00003-of-00011", "bit", random.Random(1))
    part("2/2")  # pieces 0, 2, 4 …
    assert checksums(folder) != wanted
    part("1/2")
    assert checksums(folder) == wanted
    assert "kept 4 finished pieces of 5, 1 to do" in capsys.readouterr().out


def test_a_whole_build_and_a_double_are_refused(part, build, tmp_path, capsys):
    folder = part("1/3")
    of = str(folder), "build", "--cache_dir"
    with lock.held(*of, "2-of-3", shared=True):
        with pytest.raises(UserError, match=r"another build is writing .*: part 2 of 3, process"):
            build(tmp_path, PIECES)
        with pytest.raises(UserError, match=r"another build is writing .*: part 2 of 3, process"):
            part("2/3")
        part("3/3")  # others go on
    with lock.held(*of), pytest.raises(UserError, match=r"another build is writing .*: process"):
        part("2/3")
    build(tmp_path, PIECES)
    assert "next: " in capsys.readouterr().out


def test_a_double_that_no_lock_keeps_away(build, tmp_path, monkeypatch, wanted, checksums):
    """Both write every piece, one between the pieces of the other; other parts run, too."""

    def flock(*_):
        raise OSError(lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    others = ["1/2", "2/2", "2/3", "1/2"]

    def run(function, elements, *_, **__):
        counts = Counter()
        for element in elements:
            counts += function(element)
            if others:
                build(tmp_path, PIECES, f"--part={others.pop()}")
        return counts

    monkeypatch.setattr(local_workers, "run", run)
    folder = build(tmp_path, PIECES, "--part=1/2")
    build(tmp_path, PIECES, "--part=2/2")
    assert not others
    assert checksums(folder) == wanted


def test_partial_files_of_killed_parts(part, wanted, checksums, tmp_path):
    folder = part("1/3")
    left = folder / f"{files.PARTIAL}0-train.tfrecord-00001-of-00011"
    left.write_bytes(b"of a killed part")
    (folder / ".lock-2-of-3").write_text("of a killed part")
    part("2/3")
    assert left.exists()  # it may belong to a part that runs
    with lock.held(str(folder), "build", "--cache_dir", "1-of-3", shared=True):
        part("3/3")
        assert left.exists()
    part("3/3")
    assert checksums(folder) == wanted


@pytest.mark.parametrize("given", ["5/4", "1/0", "/", "1", "-1/4", "1/4/2"])
def test_what_is_no_part(flags, tmp_path, given):
    with pytest.raises(UserError, match=f"--part={given}: it must be K/N, the part's number"):
        command.main(flags(tmp_path, f"--part={given}"))


def test_the_others_pieces_count_as_unseen(part, monkeypatch):
    """A part must not give up because of faults that are few in the whole corpus."""
    seen = []

    @contextlib.contextmanager
    def monitored(monitor, *_):
        yield
        monitor.look()
        seen.append(monitor.unseen)

    monkeypatch.setattr(engine, "monitored", monitored)
    part("1/2")
    assert seen == [pytest.approx(0.5, abs=0.1)]


def test_faulty_documents_are_counted_over_all_parts(build, tmp_path):
    rows = ['{"text": "good"}'] * 400 + ['{"text": ["no text"]}'] * 60
    (tmp_path / "bad.jsonl").write_text("\n".join(rows))
    given = f"--corpus=json:{tmp_path}/bad.jsonl?validation=0", "--shard_bytes=1000"

    def part(name, limit):
        return build(tmp_path, f"--part={name}", *given, f"--max_quarantined={limit}")

    part("2/2", 0.1)
    with pytest.raises(UserError, match=r"13.0% of the documents are faulty"):
        part("1/2", 0.1)
    folder = part("1/2", 0.2)
    assert (folder / "COMPLETED").exists()


class Array:
    """An array job: the commands of all parts, which a scheduler starts again when they die."""

    def __init__(self, command, parts: int, chance: random.Random, **environment: str):
        self._command, self._parts, self._environment = command, parts, environment
        self._random = chance
        self._running = {number: self._start(number) for number in range(1, parts + 1)}

    def _start(self, number: int):
        return launched([*self._command, f"--part={number}/{self._parts}"], **self._environment)

    def kill(self, kills: int, is_complete) -> int:
        """Kills parts at random moments and starts them again, some twice, until all is complete.

        Returns the number of kills.
        """
        done = 0
        while done < kills and not is_complete():
            time.sleep(self._random.uniform(0, 2))
            number = self._random.choice([*self._running])
            if self._running[number].poll() is None:
                self._running[number].send_signal(signal.SIGKILL)
                done += 1
            self._running[number].communicate()
            self._running[number] = self._start(number)
            if self._random.random() < 0.2:
                self._end(self._start(number))
        return done

    def _end(self, process) -> bool:
        """Waits for a command; returns whether it was refused beside its double."""
        _, err = process.communicate(timeout=300)
        refused = process.returncode == 2 and "another build is writing" in err
        assert process.returncode == 0 or refused, err
        return refused

    def finish(self) -> None:
        for number, process in self._running.items():
            if self._end(process):
                assert not self._end(self._start(number))


@pytest.mark.google
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_four_parts_at_once_with_twenty_kills(flags, wanted, checksums, tmp_path, in_bucket, place):
    chance, kills, copy = random.Random(3), 0, tmp_path / "copy"
    with GcsServer() as gcs:
        in_bucket(gcs)
        while kills < 20:
            copy.mkdir()
            where = copy if place == "folder" else "gs://bucket/cache"
            command = [sys.executable, "-m", "pipeline.build", *flags(where, PIECES)]
            array = Array(command, 4, chance, **gcs.environment())
            completed = files.join(str(where), TASK, "COMPLETED")
            kills += array.kill(20 - kills, lambda path=completed: files.exists(path))
            array.finish()
            if place == "bucket":
                (copy / TASK).mkdir()
                for name in gcs.names(f"cache/{TASK}/"):
                    (copy / TASK / name.rpartition("/")[2]).write_bytes(gcs.read(name))
                gcs.store.buckets["bucket"].clear()
            assert checksums(copy / TASK) == wanted
            shutil.rmtree(copy)
