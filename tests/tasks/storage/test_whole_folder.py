"""Folders that appear complete or not at all, and what killed and ended processes leave."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tasks.storage import whole_folder
from tasks.terminal.command_line import UserError
from tests.support.child import beginning

WRITER = """
import sys, time
from tasks.storage import whole_folder
from tasks.terminal import interrupt

interrupt.end_at_once("program", "run it again", terminated=True)
with whole_folder.written(sys.argv[1]) as folder:
    open(f"{folder}/a", "w").close()
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def writer(tmp_path):
    process = subprocess.Popen(
        beginning([sys.executable, "-c", WRITER, str(tmp_path / "model")]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def write(path):
    with whole_folder.written(str(path)) as folder:
        (path.parent / folder / "b").touch()


def names(folder):
    return sorted(each.name for each in folder.iterdir())


def test_a_folder_appears_when_it_is_complete(tmp_path):
    with whole_folder.written(str(tmp_path / "new" / "model")) as folder:
        assert os.path.dirname(folder) == str(tmp_path / "new")
        assert not (tmp_path / "new" / "model").exists()
    assert names(tmp_path / "new") == ["model"]
    assert (tmp_path / "new" / "model").stat().st_mode & 0o777 == 0o755


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="no"), whole_folder.written(str(tmp_path / "model")):
        raise ValueError("no")
    assert names(tmp_path) == []


def test_a_folder_made_meanwhile_is_kept(tmp_path):
    path = tmp_path / "model"
    with pytest.raises(UserError, match="was made meanwhile"), whole_folder.written(str(path)):
        write(path)
    assert names(tmp_path) == ["model"]
    assert names(path) == ["b"]


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_deletes_what_was_begun_and_says_one_line(writer, tmp_path, number, code, word):
    assert len(names(tmp_path)) == 1
    writer.send_signal(number)
    _, errors = writer.communicate(timeout=30)
    assert (writer.returncode, errors) == (code, f"\nprogram: {word}; run it again\n")
    assert names(tmp_path) == []


def test_only_folders_that_no_process_owns_are_deleted(writer, tmp_path):
    (begun,) = names(tmp_path)
    assert re.fullmatch(r"\.unfinished-model-[a-z0-9_]{8}", begun)
    others = [".unfinished-models-abcdefgh", ".unfinished-model-notes", ".model-abcdefgh"]
    for other in others:
        (tmp_path / other).mkdir()
    write(tmp_path / "model")
    assert names(tmp_path) == sorted([begun, "model", *others])
    writer.kill()
    writer.communicate()
    (tmp_path / "model" / "b").unlink()
    (tmp_path / "model").rmdir()
    write(tmp_path / "model")
    assert names(tmp_path) == sorted(["model", *others])


def test_places_without_folders_are_named():
    for path in ("/proc/x", "/proc/x/y"):
        message = "/proc/x.*: no folder can be made here"
        with pytest.raises(UserError, match=message), whole_folder.written(path):
            pass
