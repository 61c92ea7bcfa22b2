"""Faults in builds: caches end up equal, and a difference is noticed."""

import os
import re

import pytest

from tasks.terminal.command_line import UserError
from tests.faults import __main__ as faults
from tests.faults.builds import Lab, Trial

pytestmark = pytest.mark.processes
THREE_TIMES = (
    "Ctrl-C, once or twice",
    "search for duplicates killed",
    "takedown killed",
    "build with filters killed",
    "build with exclude lists killed",
)


@pytest.fixture
def given(corpus, vocabulary):
    return ["builds", f"--vocabulary={vocabulary}", "--extra_ids=100", f"--corpus={corpus}"]


@pytest.fixture
def run(given, capsys):
    """Returns a function: flags -> (exit code, cells of the table's lines by fault, stderr)."""

    def command(*flags):
        code = faults.main([*given, "--corpus_bytes=600000", *flags])
        out, err = capsys.readouterr()
        lines = [line.strip("|").split("|") for line in out.splitlines() if line.startswith("| ")]
        return code, {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}, err

    return command


def check(code, table, err, kills, others):
    assert code == 0, err
    del table["fault"]
    times = {name: int(cells[0]) for name, cells in table.items()}
    assert sum(count for name, count in times.items() if "SIGKILL" in name) == kills
    assert len(times) == 21
    for name, cells in table.items():
        wanted = 3 * others if name in THREE_TIMES else others
        assert times[name] == wanted or "SIGKILL" in name
        equal, of = re.fullmatch(r"(\d+) of (\d+)", cells[2]).groups()
        assert equal == of != "0"
        assert cells[3:5] == ["0", "0"]


@pytest.mark.slow
def test_a_few_faults_of_every_kind(run, tmp_path):
    code, table, err = run("--kills=4", "--others=1", "--workers=1", f"--output={tmp_path}/lab")
    check(code, table, err, 4, 1)
    assert table["SIGKILL of the build"][5] == "0"
    assert os.listdir(tmp_path / "lab")


def test_a_difference_is_noticed(given, tmp_path):
    flags = faults.command_line().parse_args([*given, "--corpus_bytes=100000", "--workers=1"])
    trial = Trial(Lab(flags, tmp_path), "trial")
    trial.copy_reference()
    path = sorted(trial.cache.glob("train.tfrecord-*"))[0]
    path.write_bytes(path.read_bytes() + b"more")
    next(trial.cache.glob("train.documents-*")).unlink()
    with pytest.raises(UserError, match=r"differs in train\."):
        trial.audit()
    assert (trial.outcome.counts["caches"], trial.outcome.counts["equal"]) == (1, 0)
    assert trial.outcome.counts["documents lost"] > 0


def test_output_must_be_new(run, tmp_path):
    (tmp_path / "something").touch()
    with pytest.raises(UserError, match="is not empty"):
        run(f"--output={tmp_path}")
