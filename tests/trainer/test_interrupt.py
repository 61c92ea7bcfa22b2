"""Ctrl-C in training saves the state, and a step that memory cannot hold is one line."""

import json
import resource
import signal
import subprocess
import time

import pytest

from tasks.terminal.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from tests.support.child import beginning
from tests.trainer.test_pretrain import ROOT, command
from trainer.engine import hardware

pytestmark = pytest.mark.processes


def pretrain(cache, model_dir, *flags):
    return command(
        *("trainer.pretrain", "--preset=t5_1_1_tiny", "--task=python_docs_span_corruption"),
        *(f"--cache_dir={cache}", f"--model_dir={model_dir}", "--metrics.every_steps=1"),
        *("--lengths.inputs=64", "--lengths.targets=18", "--metrics.tensorboard=false"),
        *("--evaluation.every_steps=0", *flags),
    )


def start(arguments, bytes_of_address_space=resource.RLIM_INFINITY):
    return subprocess.Popen(
        beginning(arguments, address_space=bytes_of_address_space),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_ctrl_c_saves_the_state(text_cache, tmp_path):
    model_dir = tmp_path / "model"
    process = start(pretrain(text_cache, model_dir, "--batch_size=4", "--train_steps=1000000"))
    metrics = model_dir / "metrics.jsonl"
    while not metrics.exists() or '"step": 3,' not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_INTERRUPTED, errors
    lines = errors.splitlines()
    assert "Ctrl-C: saving the state after this update; again: stop at once" in lines
    (saved,) = (path.name for path in model_dir.glob("checkpoint_*"))
    step = saved.partition("_")[2]
    assert lines[-1] == f"Ctrl-C: saved step {step}; run the same command to resume"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert max(steps) == int(step)


@pytest.mark.slow
def test_too_large_a_batch_is_one_line(text_cache, tmp_path):
    # As much address space as the process may use, so that the same happens on every machine.
    process = start(
        pretrain(text_cache, tmp_path / "model", "--batch_size=40000", "--train_steps=2"), 16 << 30
    )
    _, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_USER_ERROR, errors
    assert "Traceback" not in errors
    last = errors.splitlines()[-1]
    for words in ("out of memory", "--microbatches", "--model.remat", "--batch_size"):
        assert words in last


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 59 bytes."), "59 bytes"),
        (RuntimeError("INTERNAL: Error dispatching: Out of memory allocating 7 bytes."), "7 bytes"),
        (MemoryError("Unable to allocate 9.31 GiB for an array"), "9.31 GiB"),
        (MemoryError(), "out of memory: buy more"),
    ],
)
def test_allocations_that_fail_are_named(error, words):
    with pytest.raises(UserError, match=words), hardware.enough_memory("buy more"):
        raise error


def test_other_errors_keep_their_traceback():
    with pytest.raises(RuntimeError), hardware.enough_memory("buy more"):
        raise RuntimeError("INTERNAL: a bug")
