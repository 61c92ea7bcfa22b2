"""SIGTERM during an evaluation: the step is saved, and the next start makes the evaluation."""

import json
import re
import signal
import subprocess
import time

import pytest

from tests.trainer.engine.test_processes import free_port
from tests.trainer.test_pretrain import ROOT, assert_same_state, command, curve, run, state
from trainer.engine.determinism import cores
from trainer.engine.stopping import EXIT_PREEMPTED

pytestmark = pytest.mark.processes

# The evaluation after update 3 has about a hundred batches of one row.
EVERY, STEPS = 3, 7


def pretrain(cache, model_dir, *flags):
    return command(
        *("trainer.pretrain", "--preset=t5_1_1_tiny", "--task=python_docs_span_corruption"),
        *(f"--cache_dir={cache}", f"--model_dir={model_dir}", "--batch_size=4"),
        *("--lengths.inputs=64", "--lengths.targets=18", "--metrics.every_steps=1"),
        *(f"--evaluation.every_steps={EVERY}", "--evaluation.batch_size=2"),
        *("--checkpoint.every_steps=0", "--checkpoint.best_metric=loss", "--checkpoint.keep=1"),
        *("--metrics.tensorboard=false", f"--train_steps={STEPS}"),
        *flags,
    )


def start(arguments):
    return subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_evaluation(process, model_dir, step):
    """Waits until the evaluation after `step` has begun: it follows this step's metrics."""
    metrics = model_dir / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step}, "split": "train"' not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def evaluations(model_dir):
    return [line["step"] for line in curve(model_dir) if line["split"] == "validation"]


def best(model_dir, step=STEPS):
    return json.loads((model_dir / f"checkpoint_{step}/run/metadata").read_text())["best"]


@pytest.fixture(scope="module")
def undisturbed(text_cache, tmp_path_factory):
    """The model directory of a run that was never stopped."""
    model_dir = tmp_path_factory.mktemp("undisturbed") / "model"
    made = run(pretrain(text_cache, model_dir))
    assert made.returncode == 0, made.stderr
    return model_dir


@pytest.mark.slow
@pytest.mark.parametrize("step", [EVERY, STEPS])
def test_the_evaluation_is_made_after_the_resume(text_cache, undisturbed, tmp_path, step):
    model_dir = tmp_path / "model"
    process = start(pretrain(text_cache, model_dir))
    wait_for_evaluation(process, model_dir, step)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_PREEMPTED, errors
    assert f"SIGTERM: saved step {step}" in errors
    assert step not in evaluations(model_dir)
    software = model_dir / "software.json"
    software.write_text(re.sub('"cores": [0-9]+', '"cores": 999', software.read_text()))

    made = run(pretrain(text_cache, model_dir))
    assert made.returncode == 0, made.stderr
    assert f"changed       since the last start: cores was 999, is {cores()}" in made.stdout
    assert f"with identical results on {cores()} core(s)" in made.stdout
    assert evaluations(model_dir) == [3, 6, 7]
    assert curve(model_dir) == curve(undisturbed)
    if step < STEPS:
        assert best(model_dir) == best(undisturbed)
    assert_same_state(state(undisturbed, STEPS), state(model_dir, STEPS))


@pytest.mark.slow
def test_a_run_stopped_in_the_evaluation_that_it_begins_with_makes_it_again(
    text_cache, undisturbed, tmp_path
):
    model_dir = tmp_path / "model"
    process = start(pretrain(text_cache, model_dir))
    wait_for_evaluation(process, model_dir, EVERY)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    process = start(pretrain(text_cache, model_dir))
    for line in process.stdout:
        if line.startswith("this run"):
            break
    time.sleep(1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_PREEMPTED, errors
    made = run(pretrain(text_cache, model_dir))
    assert made.returncode == 0, made.stderr
    assert curve(model_dir) == curve(undisturbed)
    assert_same_state(state(undisturbed, STEPS), state(model_dir, STEPS))


@pytest.mark.slow
def test_two_processes_stop_at_the_same_batch(text_cache, tmp_path):
    model_dir = tmp_path / "model"
    port = free_port()
    both = [
        start(
            pretrain(
                text_cache,
                model_dir,
                f"--processes.coordinator=localhost:{port}",
                *("--processes.count=2", f"--processes.index={index}"),
            )
        )
        for index in range(2)
    ]
    wait_for_evaluation(both[0], model_dir, EVERY)
    both[1].send_signal(signal.SIGTERM)
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == EXIT_PREEMPTED, errors
        assert f"SIGTERM: saved step {EVERY}" in errors
    assert evaluations(model_dir) == []
