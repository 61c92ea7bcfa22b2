"""Signals and full memory stop a run, and its processes agree on an error."""

import re
import signal
import time

import jax
import pytest

from tasks.terminal.command_line import EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError
from tests.support import runs
from tests.support.child import beginning
from tests.support.runs import curve, done, finish, metadata, start, start_all, state
from tests.support.trees import assert_equal
from trainer.engine import hardware
from trainer.engine.determinism import cores
from trainer.engine.stopping import EXIT_PREEMPTED, Stop


@pytest.fixture
def ctrl_c_interrupts():
    """Handles Ctrl-C as Python does; the processes of a parallel pytest would end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def failing():
    raise UserError("no batch")


def test_a_second_ctrl_c_stops_at_once(ctrl_c_interrupts, capsys):
    before = signal.getsignal(signal.SIGINT)
    with Stop() as stop:
        assert not stop.asked()
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop.received_alone()
        assert not stop  # until it is asked
        assert stop.asked()
        assert stop
        assert stop.cause == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert stop.exit_code(3, complete=False) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "Ctrl-C: saved step 3; run the same command to resume\n"


def test_a_run_in_the_background_ignores_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_of_a_run_alone_stops_it_and_of_one_process_of_several_is_raised(monkeypatch):
    stop = Stop()
    assert stop.agreed(lambda: 3) == 3
    assert not stop
    assert stop.agreed(failing) is None
    assert stop
    with pytest.raises(UserError, match="no batch"):
        stop.exit_code(2, complete=False)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    stop = Stop()
    with pytest.raises(UserError, match="no batch"):
        stop.agreed(failing)
    assert not stop


# The evaluation after update 3 has about a hundred batches of one row.
EVERY, STEPS = 3, 7


def pretrain(cache, model_dir, *flags):
    return runs.pretrain(
        *(cache, model_dir, f"--train_steps={STEPS}", "--metrics.tensorboard=false"),
        *(f"--evaluation.every_steps={EVERY}", "--evaluation.batch_size=2"),
        *("--checkpoint.every_steps=0", "--checkpoint.best_metric=loss", "--checkpoint.keep=1"),
        *flags,
    )


def wait_for_evaluation(process, model_dir, step):
    """Waits until the evaluation after `step` has begun: it follows this step's metrics."""
    metrics = model_dir / "metrics.jsonl"
    while not metrics.exists() or f'"step": {step}, "split": "train"' not in metrics.read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)


def evaluations(model_dir):
    return [line["step"] for line in curve(model_dir) if line["split"] == "validation"]


@pytest.fixture(scope="module")
def undisturbed(text_cache, tmp_path_factory):
    """The model directory of a run that was never stopped."""
    model_dir = tmp_path_factory.mktemp("undisturbed") / "model"
    done(pretrain(text_cache, model_dir))
    return model_dir


def stop(process, signal_number=signal.SIGTERM, code=EXIT_PREEMPTED):
    """Ends a process by a signal; returns what it said on stderr."""
    process.send_signal(signal_number)
    ((_, errors),) = finish([process], code)
    return errors


def assert_undisturbed(cache, model_dir, undisturbed):
    """Runs the same command to its end; returns its output."""
    made = done(pretrain(cache, model_dir))
    assert curve(model_dir) == curve(undisturbed)
    assert_equal(state(model_dir, STEPS), state(undisturbed, STEPS))
    return made.stdout


@pytest.mark.slow
@pytest.mark.parametrize("step", [EVERY, STEPS])
def test_the_evaluation_is_made_after_the_resume(text_cache, undisturbed, tmp_path, step):
    model_dir = tmp_path / "model"
    process = start(pretrain(text_cache, model_dir))
    wait_for_evaluation(process, model_dir, step)
    assert f"SIGTERM: saved step {step}" in stop(process)
    assert step not in evaluations(model_dir)
    software = model_dir / "software.json"
    software.write_text(re.sub('"cores": [0-9]+', '"cores": 999', software.read_text()))
    said = assert_undisturbed(text_cache, model_dir, undisturbed)
    assert f"changed       since the last start: cores was 999, is {cores()}" in said
    assert f"with identical results on {cores()} core(s)" in said
    assert evaluations(model_dir) == [3, 6, 7]
    if step < STEPS:
        assert metadata(model_dir, STEPS)["best"] == metadata(undisturbed, STEPS)["best"]


@pytest.mark.slow
def test_a_run_stopped_in_the_evaluation_that_it_begins_with_makes_it_again(
    text_cache, undisturbed, tmp_path
):
    model_dir = tmp_path / "model"
    process = start(pretrain(text_cache, model_dir))
    wait_for_evaluation(process, model_dir, EVERY)
    stop(process)
    process = start(pretrain(text_cache, model_dir))
    assert any(line.startswith("this run") for line in process.stdout)
    time.sleep(1)
    stop(process)
    assert_undisturbed(text_cache, model_dir, undisturbed)


@pytest.mark.slow
def test_two_processes_stop_at_the_same_batch(text_cache, tmp_path):
    model_dir = tmp_path / "model"
    both = start_all(pretrain(text_cache, model_dir))
    wait_for_evaluation(both[0], model_dir, EVERY)
    both[1].send_signal(signal.SIGTERM)
    for _, errors in finish(both, EXIT_PREEMPTED):
        assert f"SIGTERM: saved step {EVERY}" in errors
    assert evaluations(model_dir) == []


QUIET = ("--metrics.tensorboard=false", "--evaluation.every_steps=0")


@pytest.mark.processes
def test_ctrl_c_saves_the_state(text_cache, tmp_path):
    model_dir, endless = tmp_path / "model", "--train_steps=1000000"
    process = start(beginning(runs.pretrain(text_cache, model_dir, endless, *QUIET)))
    wait_for_evaluation(process, model_dir, 3)
    lines = stop(process, signal.SIGINT, EXIT_INTERRUPTED).splitlines()
    assert "Ctrl-C: saving the state after this update; press again to stop at once" in lines
    (saved,) = (path.name for path in model_dir.glob("checkpoint_*"))
    step = saved.partition("_")[2]
    assert lines[-1] == f"Ctrl-C: saved step {step}; run the same command to resume"
    assert max(line["step"] for line in curve(model_dir)) == int(step)


@pytest.mark.slow
def test_too_large_a_batch_is_one_line(text_cache, tmp_path):
    large = ("--batch_size=40000", "--train_steps=2")
    arguments = runs.pretrain(text_cache, tmp_path / "model", *large, *QUIET)
    # As much address space as the process may use, so that the same happens on every machine.
    ((_, errors),) = finish([start(beginning(arguments, address_space=16 << 30))], EXIT_USER_ERROR)
    assert "Traceback" not in errors
    for words in ("out of memory", "--microbatches", "--model.remat", "--batch_size"):
        assert words in errors.splitlines()[-1]


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
