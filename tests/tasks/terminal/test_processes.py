"""Processes that divide work without Beam: Ctrl-C is one line, and none outlives its parent."""

import os
import signal
import sys
import time

import pytest

from tasks import annexes
from tests.support.child import beginning
from tests.support.processes import ROOT, completed, launched, started, wait_for
from tests.support.small_tokenizers import t5

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


DRY_RUNS = "dry_run" in annexes.entries("flags.build")
CUT = annexes.entries("commands.vocabularies").get("vocab trim")


@pytest.fixture(
    params=[
        *["workers of a dry run"] * DRY_RUNS,
        *["workers of a cut"] * bool(CUT),
        "SentencePiece's trainer",
    ]
)
def parent(request, corpus, tmp_path):
    """Returns a command that has just started its children, and that runs in a session."""
    if "dry run" in request.param:
        words = ["-m", "pipeline.build", "--task=lm", "--name=x", f"--corpus=text:{corpus}",
                 "--vocabulary=bytes", f"--cache_dir={tmp_path}/cache", "--dry_run",
                 "--workers=2"]  # fmt: skip
    elif "cut" in request.param:
        corpus.with_name("second.txt").write_bytes(corpus.read_bytes())
        model = t5(tmp_path / "t5", corpus.read_text().split()[:2000], 100)
        words = ["-m", CUT, f"--vocabulary={model}", f"--corpus=text:{tmp_path}/*.txt",
                 "--workers=2", f"--output={tmp_path}/cut"]  # fmt: skip
    else:
        words = ["-m", "vocab.train", f"--corpus=text:{corpus}", "--vocab_size=8000",
                 f"--output={tmp_path}/vocabulary"]  # fmt: skip
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
