"""A takedown holds though an older build of the cache goes on: absence by a reader of our own."""

import contextlib
import functools
import json
import pathlib
import pickle
import re
import shutil
from collections import Counter

import pytest

from pipeline import verify as command
from pipeline.build import main
from pipeline.building import lifecycle
from pipeline.runners import local_workers
from pipeline.verification.cache import verify
from tasks.cache.manifest import PLAN_MARK
from tasks.cache.receipts import finished
from tasks.storage import files, lock
from tasks.storage.store import Store
from tasks.terminal.command_line import UserError
from tests.support.plain_records import read_rows

pytestmark = pytest.mark.processes

TASK = "x_lm"
ROOT = "gs://bucket/cache"
FOLDER = f"{ROOT}/{TASK}"
LISTED = [f"d{number}" for number in range(0, 40, 7)]
REPLACED = "got another plan while this build ran"


def text(name: str) -> str:
    return f"<{name}> " + " ".join(f"{name} says {word}." for word in range(int(name[1:]) % 5 + 3))


def write_corpus(path: pathlib.Path, numbers: range) -> None:
    rows = [{"id": f"d{number}", "text": text(f"d{number}")} for number in numbers]
    path.write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def build(tmp_path):
    """Returns a function that builds 40 documents in 6 pieces, by default in a bucket."""
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "a.jsonl", range(40))
    (tmp_path / "ids").write_text("\n".join(LISTED))

    def run(*more: str, cache_dir=ROOT) -> None:
        main([
            "--task=lm", "--name=x", f"--corpus=json:{tmp_path}/corpus/*.jsonl?validation=0.1",
            "--vocabulary=bytes", "--extra_ids=100", f"--cache_dir={cache_dir}",
            "--row_tokens=64", "--shard_bytes=700", *more,
        ])  # fmt: skip

    return run


class Runner:
    """Runs pieces in this process, and lets others act between them, as time goes by.

    `before` is called with the number of the piece; it may end the command, whose job goes on by
    `go_on`, as Dataflow's does.
    """

    def __init__(self, monkeypatch):
        self.before = lambda number: None
        self.left = []
        monkeypatch.setattr(local_workers, "run", self.run)

    def run(self, function, elements, *_, **__):
        before, self.before = self.before, lambda number: None
        job = pickle.loads(pickle.dumps(function))
        counts = Counter()
        for number, element in enumerate(elements):
            self.left = [functools.partial(job, each) for each in elements[number:]]
            before(number)
            counts += job(element)
        return counts

    def go_on(self):
        """Runs the rest of a job whose command has ended; returns the errors of its pieces."""
        errors = []
        for piece in self.left:
            try:
                piece()
            except UserError as error:
                errors.append(str(error))
        return errors


@pytest.fixture
def runner(monkeypatch):
    return Runner(monkeypatch)


def expire(gcs):
    """Takes away the lock of a command that was stopped for longer than its lock lasts."""
    gcs.store.delete("bucket", f"cache/{TASK}/{lock.LOCK}", {})


def stream(folder: str, names) -> str:
    """Returns all text in the files of rows."""
    found = []
    for name in sorted(names):
        rows = read_rows(files.read_bytes(f"{folder}/{name}"))
        found += [token for row in rows for token in row["targets"]]
    return bytes(token - 3 for token in found if token > 2).decode()


def held(folder: str = FOLDER) -> set[str]:
    """Returns the documents in a cache's records, whatever its other files say."""
    names = [name for name in files.list_names(folder) if ".tfrecord-" in name]
    return set(re.findall("<(d[0-9]+)>", stream(folder, names)))


def contents(folder: str) -> dict[str, bytes]:
    return {name: files.read_bytes(f"{folder}/{name}") for name in files.list_names(folder)
            if not name.startswith(".before-")}  # fmt: skip


def assert_taken_down(build, tmp_path):
    """Asserts that the cache is what a build with the list makes, and stays so."""
    assert_lists(FOLDER, tmp_path)
    build(f"--exclude={tmp_path}/ids", cache_dir=f"{tmp_path}/scratch")
    assert contents(FOLDER) == contents(f"{tmp_path}/scratch/{TASK}")


class Frozen(BaseException):
    """The command dies; its job does not."""


def dies(number):
    raise Frozen


@pytest.mark.google
@pytest.mark.parametrize(
    "name",
    [PLAN_MARK, "train.tfrecord-00000", "train.documents-00001", "train.receipt-00000",
     "manifest.json", "COMPLETED"],
)  # fmt: skip
def test_a_build_stopped_before_it_writes_a_file(build, runner, gcs, tmp_path, monkeypatch, name):
    usual, stopped = Store.upload, []

    def upload(path, source, check=None):
        if name in path._url and not stopped:
            stopped.append(path)
            expire(gcs)
            build(f"--exclude={tmp_path}/ids")
        return usual(path, source, check)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "upload", upload)
        with pytest.raises(UserError, match=f"{REPLACED}|another build wrote .*plan.json"):
            build()
    assert stopped
    assert not held() & set(LISTED)
    build(f"--exclude={tmp_path}/ids")
    assert_taken_down(build, tmp_path)
    build()  # the list stays in force
    assert_taken_down(build, tmp_path)


@pytest.mark.google
def test_a_build_stopped_at_any_request(build, runner, gcs, tmp_path, monkeypatch):
    """Also between a look at the plan and what is written after it."""

    def stopped_at(moment, takedown):
        """Builds in a new bucket with a takedown before a request; returns the number of all."""
        gcs.store.buckets["bucket"].clear()
        calls, usual = [], Store.ask

        def ask(path, action):
            if path._url.endswith(lock.LOCK):  # rewritten as time goes by
                return usual(path, action)
            calls.append(path)
            if len(calls) == moment + 1:
                expire(gcs)
                takedown()
            return usual(path, action)

        with monkeypatch.context() as patch:
            patch.setattr(Store, "ask", ask)
            build()
        return len(calls)

    takedown = functools.partial(build, f"--exclude={tmp_path}/ids")
    total = stopped_at(-1, takedown)
    completed = 0
    # The number of requests varies a little, as files are read in ranges.
    for moment in range(3, total - 2, 23):
        with contextlib.suppress(UserError):
            stopped_at(moment, takedown)
            completed += 1
        # Nothing of the takedown was replaced or deleted.
        assert verify(FOLDER)[1] == [], moment
        assert held() == {f"d{number}" for number in range(40)} - set(LISTED), moment
    assert completed <= 1


@pytest.mark.google
def test_a_job_that_outlives_its_command_writes_nothing_after_a_takedown(
    build, runner, gcs, tmp_path, monkeypatch
):
    runner.before = lambda number: dies(number) if number == 3 else None
    with pytest.raises(Frozen):
        build()
    job = [*runner.left]
    # The service still runs the job, and refuses another of this name; the plan is the new one.
    runner.before = dies
    with pytest.raises(Frozen):
        build(f"--exclude={tmp_path}/ids")
    left, runner.left = runner.left, job
    assert len(runner.go_on()) == len(job)
    assert all(REPLACED in error for error in runner.go_on())
    assert not any(".receipt-" in name for name in gcs.names() if "00005-of" in name)
    build(f"--exclude={tmp_path}/ids")
    assert_taken_down(build, tmp_path)
    # The new job's pieces, repeated by the service, change nothing.
    runner.left = left
    assert runner.go_on() == []
    assert_taken_down(build, tmp_path)


@pytest.mark.google
def test_an_extension_while_an_older_build_goes_on(build, runner, gcs, tmp_path):
    def extend(number):
        if number == 3:
            expire(gcs)
            write_corpus(tmp_path / "corpus" / "b.jsonl", range(40, 70))
            build("--extend")

    runner.before = extend
    with pytest.raises(UserError, match=REPLACED):
        build()
    assert verify(FOLDER)[1] == []
    found = contents(FOLDER)
    gcs.store.buckets["bucket"].clear()
    (tmp_path / "corpus" / "b.jsonl").unlink()
    build()
    write_corpus(tmp_path / "corpus" / "b.jsonl", range(40, 70))
    build("--extend")
    assert contents(FOLDER) == found
    assert held() == {f"d{number}" for number in range(70)}


def strip(folder: pathlib.Path) -> None:
    """Makes the receipts those of version 0.2.0, which name no plan."""
    for path in folder.glob("*.receipt-*"):
        value = json.loads(path.read_text())
        del value["plan"]
        files.write_json(str(path), value)


def inodes(folder: pathlib.Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("*.tfrecord-*")}


def test_caches_of_version_0_2_0(build, runner, tmp_path, capsys):
    cache = tmp_path / "cache" / TASK
    build(cache_dir=cache.parent)
    whole = shutil.copytree(cache, tmp_path / "whole")
    strip(cache)
    old = contents(str(cache))
    assert verify(str(cache))[1] == []
    build(cache_dir=cache.parent)
    assert "complete and valid: nothing to do" in capsys.readouterr().out
    assert contents(str(cache)) == old
    # One that lost its manifest is completed without any shard's being redone.
    (cache / "manifest.json").unlink()
    before = inodes(cache)
    build(cache_dir=cache.parent)
    assert inodes(cache) == before
    # With lists, a first command looks into every shard, and keeps those that are as they should.
    build(f"--exclude={tmp_path}/ids", cache_dir=cache.parent)
    assert_lists(cache, tmp_path)
    taken, before = contents(str(cache)), inodes(cache)
    strip(cache)
    assert verify(str(cache))[1] == []
    capsys.readouterr()
    build(cache_dir=cache.parent)
    assert "complete and valid: nothing to do" in capsys.readouterr().out
    assert (contents(str(cache)), inodes(cache)) == (taken, before)
    # What an old build put back into a finished takedown, the plain command takes out again.
    strip(cache)
    strip(whole)
    for path in whole.glob("train.*-00001-of-*"):
        shutil.copy(path, cache)
    assert {"d7", "d14"} & held(str(cache))
    build(cache_dir=cache.parent)
    assert contents(str(cache)) == taken
    assert inodes(cache).items() - before.items()


def assert_lists(cache, tmp_path):
    assert held(str(cache)) == {f"d{number}" for number in range(40)} - set(LISTED)
    assert verify(str(cache))[1] == []
    assert command.main([f"--cache={cache}", f"--exclude={tmp_path}/ids"]) == 0


@pytest.mark.parametrize("more", [0, 1, 5])
def test_a_takedown_killed_while_it_renames_receipts(build, runner, tmp_path, monkeypatch, more):
    cache = tmp_path / "cache" / TASK
    build(cache_dir=cache.parent)
    (tmp_path / "ids").write_text(LISTED[1])
    usual, calls = lifecycle.write_receipt, []

    def write(*arguments):
        if len(calls) == more:
            raise Frozen
        calls.append(arguments)
        usual(*arguments)

    before = inodes(cache)
    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "write_receipt", write)
        with pytest.raises(Frozen):
            build(f"--exclude={tmp_path}/ids", cache_dir=cache.parent)
    # In between, nobody takes an old receipt for one of the new plan.
    sizes, plan = files.list_sizes(str(cache)), lifecycle.planned(str(cache))
    for split, count in plan.shards.items():
        assert not all(finished(str(cache), plan, split, n, sizes) for n in range(count))
    build(cache_dir=cache.parent)
    assert verify(str(cache))[1] == []
    build(f"--exclude={tmp_path}/ids", cache_dir=f"{tmp_path}/scratch")
    assert contents(str(cache)) == contents(f"{tmp_path}/scratch/{TASK}")
    assert len(inodes(cache).items() - before.items()) == 2  # the shards of one piece
