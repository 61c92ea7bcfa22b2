"""A cache has the same bytes whatever happens while it is built."""

import contextlib
import os
import random
import re
import signal
import subprocess
import time

import pytest

from pipeline.building import graph
from tasks.cache import receipts
from tasks.storage import files, lock
from tasks.terminal.command_line import UserError
from tests.support.damage import flip, truncate
from tests.support.processes import wait_for

pytestmark = pytest.mark.processes

TASK = "python_docs_span_corruption"
DEADLINE_SECONDS = 120


@pytest.fixture(scope="module")
def expected(cache, checksums):
    return checksums(cache)


def kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def without_progress(err: str) -> list[str]:
    return [line for line in err.splitlines() if not line.startswith("building ")]


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, err
    assert not without_progress(err)
    return out


def test_two_workers_write_the_same_bytes(start, tmp_path, checksums, expected):
    out = finish(start(tmp_path, "--workers=2"))
    assert "python -m trainer.pretrain" in out
    assert checksums(tmp_path / TASK) == expected


def test_both_tokenizers_write_the_same_bytes(build, tmp_path, checksums, expected, capsys):
    capsys.readouterr()
    assert checksums(build(tmp_path / "slow", "--tokenizer=sentencepiece")) == expected
    assert "audited" not in capsys.readouterr().out
    build(tmp_path / "fast")
    out = capsys.readouterr().out
    assert re.search(r"tokenized 2,004 texts; audited \d+ against SentencePiece", out)
    assert re.search(r"read [\d.]+ MB in [\d.]+ s$", out, re.MULTILINE)  # no speed of so little


def test_killed_at_random_moments(start, tmp_path, checksums, expected):
    folder = tmp_path / TASK
    generator = random.Random(os.environ.get("PYTEST_KILL_SEED", "7"))
    states = []
    for attempt in range(5):
        process = start(tmp_path, *(["--workers=2"] if attempt == 2 else []))
        before = len(list(folder.glob("*receipt*")))
        working = wait_for(lambda: any(folder.glob(files.PARTIAL + "*.tfrecord-*")), process)
        if working:
            time.sleep(generator.uniform(0, 0.25))
        kill(process)
        states.append((before, len(list(folder.glob("*receipt*"))), working))
    assert any(working for *_, working in states), states
    finish(start(tmp_path))
    assert checksums(folder) == expected


def test_a_build_resumes_after_any_step_of_finalisation(
    build, tmp_path, checksums, expected, capsys
):
    folder = build(tmp_path)
    order = ["info.train.json", "info.validation.json", "stats.train.json", "manifest.json"]
    order.append("COMPLETED")
    for number in range(len(order)):
        for name in order[number:]:
            (folder / name).unlink()
        capsys.readouterr()
        build(tmp_path)
        assert "read 0.0 MB" in capsys.readouterr().out
        assert checksums(folder) == expected


def fill(path):
    path.write_text('{"files": {}}')


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        ("train.tfrecord-*", truncate),
        ("validation.tfrecord-*", flip),
        ("train.rows-*", flip),
        ("train.documents-*", os.unlink),
        ("train.receipt-*", truncate),
        ("train.receipt-*", fill),
        ("validation.receipt-*", os.unlink),
        ("sentencepiece.model", flip),
        ("manifest.json", truncate),
        ("stats.train.json", fill),
        ("plan.json", truncate),
        ("plan.json", os.unlink),
    ],
)
def test_damage_is_found_and_repaired(
    build, tmp_path, cache, checksums, expected, capsys, pattern, damage
):
    folder = tmp_path / TASK
    folder.mkdir()
    for path in cache.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(sorted(folder.glob(pattern))[0])
    (folder / f"{files.PARTIAL}0-train.tfrecord-00000-of-00008").write_text("left by a kill")
    build(tmp_path)
    out = capsys.readouterr().out
    assert ("1 to do" in out) == ("-" in pattern)
    assert checksums(folder) == expected


def test_a_cache_under_repair_is_not_trusted(build, tmp_path, monkeypatch):
    folder = build(tmp_path)
    (folder / "train.receipt-00000-of-00008.json").unlink()

    def fail(*_):
        raise UserError("stopped here")

    monkeypatch.setattr(graph, "run", fail)
    with pytest.raises(UserError, match="stopped here"):
        build(tmp_path)
    assert not (folder / "manifest.json").exists()
    assert not (folder / "COMPLETED").exists()


def test_a_finished_cache_is_not_changed(tmp_path, build, checksums, expected, capsys, monkeypatch):
    read = receipts.read_receipt
    folder = build(tmp_path)
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    capsys.readouterr()
    surveys = []
    monkeypatch.setattr(receipts, "read_receipt", lambda path: surveys.append(path) or read(path))
    build(tmp_path)
    assert "nothing to do" in capsys.readouterr().out
    assert len(surveys) == len(set(surveys)) == len(list(folder.glob("*.receipt-*")))
    assert times == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert checksums(folder) == expected


def test_one_build_at_a_time(build, tmp_path):
    folder = tmp_path / TASK
    folder.mkdir()
    (folder / f"{files.PARTIAL}of-the-other").touch()
    with lock.held(str(folder), "build", "--cache_dir"):
        with pytest.raises(UserError, match=f"another build .*process {os.getpid()} on"):
            build(tmp_path)
        assert (folder / f"{files.PARTIAL}of-the-other").exists()


def test_foreign_files_are_not_changed(build, tmp_path):
    (tmp_path / TASK).mkdir()
    (tmp_path / TASK / "COMPLETED").touch()
    with pytest.raises(UserError, match=r"holds COMPLETED.*another --cache_dir"):
        build(tmp_path)
    assert os.listdir(tmp_path / TASK) == ["COMPLETED"]
