"""Real sweeps: killed and resumed, finished cells kept, failed ones recorded, mistakes named."""

import fcntl
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.support import in_process
from tests.support.processes import completed, wait_for

ROOT = pathlib.Path(__file__).parents[2]
SWEEP = '''
baseline = "relu"
seeds = [3, 4]
prepare = [
  "vocab.train --corpus={corpus} --vocab_size=300 --output={output}/vocabulary",
  """pipeline.build --task=mine_autoregressive_lm --corpus={corpus} --row_tokens=31
    --vocabulary={output}/vocabulary --cache_dir={output}/cache""",
]

[parameters]
corpus = ""

[base]
preset = "tiny_transformer_vanilla"
task = "mine_autoregressive_lm"
cache_dir = "{output}/cache"
train_steps = 200
batch_size = 4
lengths.targets = 32
model.num_decoder_layers = 1
evaluation.every_steps = 100
evaluation.batches = 2
checkpoint.every_steps = 40

[axes]
model.mlp_activations = ["relu", "squared_relu"]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a corpus of a few sentences and a sweep of two cells with two seeds."""
    made = tmp_path_factory.mktemp("sweep")
    text = [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 30]
    (made / "train.txt").write_text("\n".join(text[20:]))
    (made / "validation.txt").write_text("\n".join(text[:20]))
    (made / "mine.toml").write_text(SWEEP)
    return made


def command(folder, output, *flags):
    corpus = f"--corpus=text:{folder}/*.txt?split=train"
    file = str(folder / "mine.toml")
    return [
        *(sys.executable, "-m", "experiments.sweep", file, f"--output={output}", corpus),
        *map(str, flags),
    ]


def sweep(folder, output, *flags):
    """Runs the command in a process of its own; its cells always have theirs."""
    return completed(command(folder, output, *flags))


def here(folder, output, *flags):
    """Runs the command in this process, where no cell is to be run."""
    return in_process.run(*command(folder, output, *flags)[2:])


def results(output):
    return {
        name: (output / name).read_bytes() for name in ("table.md", "results.jsonl", "curves.png")
    }


ONE = "--seeds=3"  # of the two; every run costs seconds


@pytest.fixture(scope="module")
def finished(folder):
    """The folder of a finished sweep, what the command printed, and the bytes of its results."""
    output = folder / "whole"
    done = sweep(folder, output, ONE, "--workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    return output, done.stdout, results(output)


def check(output, printed, seeds):
    """Checks the results of a finished sweep of some seeds."""
    table = (output / "table.md").read_text()
    assert table in printed
    assert printed.endswith(
        f"written to {output}: table.md, results.jsonl, curves.png\n"
        f"next: palimpsest report {output}/cells/*/run\n"
    )
    runs = list((output / "cells").glob("*/run"))
    assert runs
    assert all((each / "config.json").exists() for each in runs)
    assert "| squared_relu" in table
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    arms = [(line["values"]["model.mlp_activations"], line["seed"]) for line in lines]
    assert arms == [(arm, seed) for arm in ("relu", "squared_relu") for seed in seeds]
    assert all(line["curve"]["steps"] == [100, 200] for line in lines)
    assert len({line["value"] for line in lines}) == len(arms)
    assert len({line["key"] for line in lines}) == len(arms)
    assert (output / "curves.png").stat().st_size > 10_000


@pytest.mark.processes
def test_a_sweep_ends_in_a_table(finished):
    output, printed, _ = finished
    check(output, printed, [3])


@pytest.mark.processes
def test_finished_cells_are_kept(folder, finished):
    output, _, before = finished
    again = here(folder, output, ONE)
    assert "2 of 2 cells finished before" in again.stdout
    assert results(output) == before
    # Another metric is read from the same runs.
    other = here(folder, output, ONE, "--metric=accuracy")
    assert other.returncode == 0, other.stderr
    assert "accuracy of the last evaluation" in other.stdout
    missing = here(folder, output, ONE, "--metric=max:acuracy")
    assert missing.returncode == 2
    assert "metric=max:acuracy: these tasks do not have this metric" in missing.stderr
    plan = here(folder, output, "--dry_run", "--seeds=3,4,5").stdout.splitlines()
    assert "4 of 6 cells to run: 800 steps, 102,400 tokens" in plan[-1]
    assert "measured on 2 finished cells" in plan[-1]


@pytest.mark.processes
def test_seeds_that_do_not_tune_run_with_the_best_value_only(folder, finished):
    output = finished[0].parent / "tuned"
    _share_prepared(finished[0], output)
    flags = (
        *("--axis=optimizer.learning_rate=1e-9,0.01", "--tune=optimizer.learning_rate"),
        *("--tune_seeds=1", "--baseline=model.mlp_activations=relu", "--train_steps=20"),
        *("--evaluation.every_steps=10", "--workers=2"),
    )
    plan = here(folder, output, "--dry_run", *flags).stdout.splitlines()
    assert "seeds after 3: at the best optimizer.learning_rate only" in plan
    assert "6 of 6 cells to run: 120 steps" in plan[-1]
    done = sweep(folder, output, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    ran = [(*line["values"].values(), line["seed"]) for line in lines]
    arms = ("relu", "squared_relu")
    assert ran[:4] == [(arm, rate, 3) for arm in arms for rate in ("1e-9", "0.01")]
    assert ran[4:] == [(arm, "0.01", 4) for arm in arms]
    before = results(output)
    again = here(folder, output, *flags)
    assert "2 of 2 cells finished before" in again.stdout
    assert results(output) == before


def _share_prepared(of, made):
    """Gives a sweep's folder the vocabulary and the cache of another."""
    made.mkdir()
    for name in ("vocabulary", "cache"):
        (made / name).symlink_to(of / name)
    prepared = json.loads((of / "prepared.json").read_text())
    moved = [[word.replace(str(of), str(made)) for word in line] for line in prepared]
    (made / "prepared.json").write_text(json.dumps(moved))


@pytest.mark.processes
def test_a_folder_of_another_sweep_is_refused(folder, finished):
    output = finished[0]
    refused = here(folder, output, "--train_steps=5")
    assert refused.returncode == 2
    assert "holds a different sweep, whose train_steps is 200, not 5" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.processes
def test_two_sweeps_in_one_folder_are_refused(folder, finished):
    output = finished[0]
    with open(output / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused = here(folder, output)
        os.unlink(output / ".lock")
    assert refused.returncode == 2
    assert "another sweep is writing" in refused.stderr


@pytest.mark.slow
def test_failed_cells_are_recorded_and_run_again_by_choice(folder, finished):
    """Cells fail where the axis has a value that only the data refuse."""
    output = finished[0]
    flags = ("--axis=model.max_positions=512,8", "--axis=model.position=absolute", ONE)
    flags = (*flags, "--axis=model.mlp_activations=relu")
    flags = (*flags, "--baseline=model.mlp_activations=relu")
    made = output.parent / "failing"
    _share_prepared(output, made)
    failed = sweep(folder, made, *flags)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "failed" in failed.stdout
    again = sweep(folder, made, *flags)
    assert again.returncode == 1
    assert "1 of 2 cells failed before" in again.stdout
    retried = sweep(folder, made, *flags, "--retry")
    assert retried.returncode == 1
    assert "[1/1]" in retried.stdout
    assert "rows have 32 positions, the model has 8" in (made / "table.md").read_text()


def processes(word):
    """Returns the ids of processes whose command line has a word."""
    found = []
    for each in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if word in (each / "cmdline").read_text().replace("\0", " "):
                found.append(int(each.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_sweep_that_is_killed_gives_the_same_bytes(folder):
    """The runner is killed in the middle of a cell, a cell in the next call; the third finishes."""
    done = sweep(folder, folder / "both", "--workers=2")
    assert done.returncode == 0, done.stdout + done.stderr
    check(folder / "both", done.stdout, [3, 4])
    output = folder / "killed"
    with subprocess.Popen(command(folder, output), cwd=ROOT, stdout=subprocess.DEVNULL) as runner:
        wait_for(lambda: list(output.glob("cells/*/run/checkpoint_*")))
        runner.kill()
    # Its run ends with it, so that the next call is not refused.
    wait_for(lambda: not processes(f"--model_dir={output}"), seconds=30)
    assert not list(output.glob("cells/*/cell.json"))
    with subprocess.Popen(
        command(folder, output), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as runner:
        wait_for(lambda: list(output.glob("cells/*seed_4*/run/checkpoint_*")))
        for each in processes(f"--model_dir={output}"):
            os.kill(each, signal.SIGKILL)
        printed, _ = runner.communicate(timeout=900)
    assert runner.returncode == 1
    assert "killed by SIGKILL" in printed
    last = sweep(folder, output)
    assert last.returncode == 0, last.stdout + last.stderr
    assert "3 of 4 cells finished before" in last.stdout
    assert results(output) == results(folder / "both")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--baseline=gelu"], "the axis model.mlp_activations has no value gelu"),
        (["--baseline=arm=gelu"], "there is no axis arm; the axes are model.mlp_activations"),
        (["--seeds=one"], "--seeds=one: give whole numbers"),
        (["--axis=batch_size"], "--axis=batch_size: write it as"),
        (["--bach_size=3"], "unknown flag --bach_size (did you mean"),
        (["--model.mlp_activations=relu"], "the sweep varies --model.mlp_activations"),
        (["--step_times=TIMES"], "lacks tiny_transformer_vanilla: measure it with"),
        (["--step_times=TIMES.no"], "No such file"),
        (["--step_times=KNOWN"], "but models of tiny_transformer_vanilla differ here: leave it"),
        (["--metric=odd"], "metric=odd: it is unknown whether lower is better; write min:odd"),
        (["--seeds="], "--seeds=: give whole numbers"),
        (["--output="], "--output is empty"),
        (["--evaluation.every_steps=0"], "evaluation.every_steps must be above 0"),
        (["--output=gs://bucket/x"], "the folder of a sweep must be local"),
    ],
)
def test_a_mistake_is_one_line(folder, tmp_path, flags, says):
    (tmp_path / "times.json").write_text("{}")
    (tmp_path / "known.json").write_text('{"tiny_transformer_vanilla": 1.0}')
    for name in ("times", "known"):
        flags = [flag.replace(name.upper(), f"{tmp_path}/{name}.json") for flag in flags]
    refused = here(folder, tmp_path / "out", *flags)
    assert refused.returncode == 2, refused.stderr
    assert says in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
