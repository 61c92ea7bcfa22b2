"""Processes that divide work without Beam: Ctrl-C is one line, and none outlives its parent."""

import os
import signal
import sys
import time

import pytest

from tests.support.cases import entries
from tests.support.child import beginning
from tests.support.processes import ROOT, completed, launched, started, wait_for

pytestmark = pytest.mark.processes


@pytest.fixture
def corpus(tmp_path):
    """Returns a corpus that takes seconds: 12 MB, of 300,000 different words."""
    path = tmp_path / "corpus.txt"
    with path.open("w") as file:
        for start in range(0, 300_000, 10):
            words = (f"{number:x}".translate(LETTERS) for number in range(start, start + 10))
            file.write(f"{' '.join(words)} " * 4 + "\n")
    return path


LETTERS = str.maketrans("0123456789", "ghijklmnop")


def _trainer(corpus, folder):
    return ["vocab.train", f"--corpus=text:{corpus}", "--vocab_size=8000",
            f"--output={folder}/vocabulary"]  # fmt: skip


PARENTS = {"SentencePiece's trainer": _trainer, **entries("PARENTS")}


@pytest.fixture(params=PARENTS)
def parent(request, corpus, tmp_path):
    """Returns a command that has just started its children, and that runs in a session."""
    words = ["-m", *PARENTS[request.param](corpus, tmp_path)]
    process = launched(beginning([sys.executable, *words]))
    assert wait_for(lambda: children(process), process), process.communicate()
    yield process
    if process.poll() is None or children(process):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def children(parent) -> list[str]:
    command = ["pgrep", "-s", parent.pid, "-f", "spawn_main"]
    return completed(command).stdout.split()


@pytest.mark.parametrize("after", [0.1, 1.0])
def test_ctrl_c_is_one_line(parent, after):
    time.sleep(after)
    os.killpg(parent.pid, signal.SIGINT)  # as a terminal does
    _, err = parent.communicate(timeout=60)
    assert err.endswith(": interrupted; run the same command to resume\n")
    assert err.count("\n") == 1, err
    assert parent.returncode == 130
    wait_for(lambda: not children(parent), seconds=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_children_end_with_their_parent(parent, number):
    time.sleep(1)
    parent.send_signal(number)
    parent.wait()
    wait_for(lambda: not children(parent), seconds=30)


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_a_script_without_a_guard_runs_once(how, tmp_path):
    (tmp_path / "corpus.txt").write_text("one two three four\n" * 50)
    words = ["--corpus=text:corpus.txt", "--vocab_size=17", "--byte_fallback=false",
             "--output=vocabulary"]  # fmt: skip
    program = f"from vocab.train import main\nprint('once')\nmain({words})\n"
    (tmp_path / "script.py").write_text(program)
    where = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    if how == "script":
        done = started("script.py", **where)
    else:
        done = started("-", input=program, **where)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("once") == 1
