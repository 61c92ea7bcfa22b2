"""examples/trainers: runs that are killed and resumed, or change ranks, have the same batches."""

import os
import signal
import sys
import time

import pytest

from tests.support.processes import PYTHONPATH, completed, launched
from tests.support.runs import ROOT, TASK

pytestmark = [pytest.mark.torch, pytest.mark.processes]

TRAINERS = ROOT / "examples" / "trainers"
MIXTURES = {
    "t5": f"{TASK}=0.7,python_docs_prefix_lm=0.3",
    "llama": "python_docs_decoder_prefix_lm=0.5,python_docs_autoregressive_lm=0.5",
}
ENVIRONMENT = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
UPDATES = 8


def words(model, cache, output):
    script = TRAINERS / "transformers_trainer.py"
    return [sys.executable, script, model, MIXTURES[model], cache, output, UPDATES]


def run(command):
    done = completed(command, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr


def steps(folder):
    """Returns the update, digest and loss of each line; of an update made twice, the last."""
    path = folder / "steps.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {int(number): (digest, float(loss)) for number, digest, loss in lines}


@pytest.mark.parametrize("model", MIXTURES)
def test_transformers_trainer_is_killed_and_resumed(text_cache, tmp_path, model):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(words(model, text_cache, whole))
    process = launched(words(model, text_cache, killed), **ENVIRONMENT)
    while len(steps(killed)) < 5:
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = steps(killed)
    (killed / f"checkpoint-{UPDATES}").mkdir(exist_ok=True)  # as a kill while it is saved
    run(words(model, text_cache, killed))
    assert len(steps(whole)) == UPDATES
    assert {number: digest for number, (digest, _) in steps(killed).items()} == {
        number: digest for number, (digest, _) in steps(whole).items()
    }
    for found in (before, steps(killed)):
        assert all(abs(found[k][1] - steps(whole)[k][1]) < 1e-4 for k in found)


def ranks(count, cache, output, updates):
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}")
    run([sys.executable, *launcher, TRAINERS / "ranks.py", TASK, cache, output, updates])
    lines = (output.parent / f"{output.name}.losses").read_text().splitlines()
    return {int(line.split()[0]): float(line.split()[1]) for line in lines}


def test_two_ranks_are_resumed_on_one(text_cache, tmp_path):
    whole = ranks(1, text_cache, tmp_path / "whole", 6)
    ranks(2, text_cache, tmp_path / "ranks", 3)
    resumed = ranks(1, text_cache, tmp_path / "ranks", 6)
    assert resumed.keys() == whole.keys() == {*range(1, 7)}
    assert all(abs(resumed[k] - whole[k]) < 1e-4 for k in whole)
