"""Wall time of runs that are killed, what a hung run waits for, and a command for events."""

import json
import shlex
import signal
import sys
import threading

import numpy as np
import pytest

from tests.support import published as published_caches
from tests.support import runs
from tests.support.processes import wait_for
from tests.support.published import Published
from tests.support.runs import TASK, curve, finish, state
from tests.support.trees import assert_equal
from trainer import loop
from trainer.monitoring import activity, goodput, hang
from trainer.reporting.metrics import read_metrics

pytestmark = pytest.mark.processes  # whole runs

STEPS = 12
FLAGS = (
    *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1", f"--train_steps={STEPS}"),
    *("--metrics.tensorboard=false", "--evaluation.every_steps=0", "--checkpoint.every_steps=5"),
)
# Python with these words trains, and writes the record of its time more often than runs need it.
OFTEN = """
import sys
from trainer.monitoring import goodput
goodput._SECONDS = 0.01
from trainer import loop, pretrain
put, last = loop.Program.put, int(sys.argv.pop(1))
def held(*given, steps=iter(range(1, 100))):
    if next(steps) > last:
        import time; time.sleep(600)
    return put(*given)
loop.Program.put = held
pretrain.main.start()
"""


def pretrain(cache, model_dir, *flags):
    return runs.pretrain(cache, model_dir, *FLAGS, *flags)


def killed(cache, model_dir, after):
    """Kills a run that has made `after` updates, once its record says so."""
    words = pretrain(cache, model_dir)[3:]
    process = runs.start([sys.executable, "-c", OFTEN, str(after), *words])
    path = model_dir / goodput.GOODPUT_FILE

    def recorded():
        entries = goodput.read(str(path))
        saved = (model_dir / "checkpoint_5").exists()  # it is written in the background
        return saved and entries and entries[-1]["step"] == after

    assert wait_for(recorded, process), process.communicate()
    process.send_signal(signal.SIGKILL)
    finish([process], -signal.SIGKILL)


def test_what_a_killed_run_has_lost_is_recorded(text_cache, tmp_path):
    model_dir, whole = tmp_path / "model", tmp_path / "whole"
    killed(text_cache, model_dir, after=8)
    said = runs.done(pretrain(text_cache, model_dir)).stdout
    runs.done(pretrain(text_cache, whole))
    # The record changes neither metrics nor arrays.
    assert curve(model_dir) == curve(whole)
    assert_equal(state(model_dir, STEPS), state(whole, STEPS))

    first, second = entries = goodput.read(str(model_dir / goodput.GOODPUT_FILE))
    assert [step for step, _ in first["marks"]] == [0, 5]
    assert [step for step, _ in second["marks"]] == [5, 10, STEPS]
    assert (first["step"], first["complete"]) == (8, False)
    assert (second["step"], second["complete"]) == (STEPS, True)
    spent = goodput.shares(entries)
    end = second["began"] + sum(second["seconds"].values())
    assert sum(spent.values()) == pytest.approx(end - first["began"], abs=0.1)
    kept = first["marks"][-1][1]
    assert spent["lost"] == pytest.approx(sum(first["seconds"].values()) - sum(kept.values()))
    assert spent["stepping"] == pytest.approx(kept["stepping"] + second["seconds"]["stepping"])
    for kind in ("lost", "down", "stepping", "compiling", "saving", "starting"):
        assert spent[kind] > 0, kind
    (line,) = [line for line in said.splitlines() if line.startswith("goodput")]
    assert line == goodput.text(entries)
    assert " in 2 processes; " in line
    assert ", lost " in line

    alone = goodput.read(str(whole / goodput.GOODPUT_FILE))
    assert len(alone) == 1
    assert goodput.shares(alone)["lost"] == goodput.shares(alone)["down"] == 0


def test_a_damaged_record_ends_no_run_and_no_limit_is_silent(text_cache, tmp_path):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / goodput.GOODPUT_FILE).write_text('{"processes": [{}]}')
    made = runs.done(pretrain(text_cache, model_dir, "--train_steps=2", "--hang_seconds=0"))
    assert "no progress" not in made.stderr
    assert "the wall time of this run is not recorded: " in made.stderr
    assert "goodput.json is damaged: restore it from a copy, or delete it" in made.stderr
    assert "\ngoodput " not in made.stdout


# --- hangs ---


def heard(path):
    """Returns the events that a command has appended to a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hangs(path, words):
    """Returns the hangs that a command has heard of whose message has these words."""
    return [each for each in heard(path) if each["event"] == "hang" and words in each["message"]]


def test_a_run_that_waits_for_data_names_the_batch_and_the_task(text_cache, tmp_path):
    sizes = {"train": (4000,) * 3, "validation": (900,)}
    whole = published_caches.make(tmp_path / "whole" / TASK, text_cache, sizes)
    published = Published(whole, tmp_path / "cache" / TASK)
    published.shards("train", 0)
    events = tmp_path / "events"

    def build():  # once the run has said that it waits
        try:
            wait_for(lambda: hangs(events, "is being built"), seconds=60)
        finally:
            published.finish()

    building = threading.Thread(target=build)
    building.start()
    flags = ("--data.follow=true", "--data.follow_shards=1", "--train_steps=20")
    command = f"--on_event=cat >> {shlex.quote(str(events))}"
    made = runs.done(
        pretrain(published.folder.parent, tmp_path / "m", *flags, "--hang_seconds=0.3", command)
    )
    building.join()
    lines = [each for each in made.stderr.splitlines() if each.startswith("no progress: ")]
    step = hangs(events, "is being built")[0]["step"]
    said = f"no progress: waiting for batch {step + 1} of {TASK}, whose cache is being built for 0:"
    assert any(each.startswith(said) and each.endswith(f"update {step}") for each in lines)
    hung = [each for each in heard(events) if each["event"] == "hang"]
    assert made.stderr.count("the Python stack, most recent call last:") == len(hung)
    assert "in _wait" in made.stderr
    assert [each["event"] for each in heard(events)][-1] == "finished"


def test_a_slow_compilation_is_called_one(monkeypatch, tmp_path, text_cache):
    from jax._src import compilation_cache, compiler

    compile_, named = compiler.backend_compile_and_load, []

    def slow(*given, **more):
        module = str(given[1].operation.attributes["sym_name"])
        if "train_step" in module or "update" in module:
            named.append(module)
            over.wait(30)
        return compile_(*given, **more)

    events, over = tmp_path / "events", threading.Event()
    monkeypatch.setattr(compiler, "backend_compile_and_load", slow)
    monkeypatch.setattr(compilation_cache, "is_cache_used", lambda backend: False)

    def heard_of_it():
        wait_for(lambda: hangs(events, "compiling (update 1)"), seconds=60)
        over.set()

    waiting = threading.Thread(target=heard_of_it)
    waiting.start()
    command = f"--on_event=cat >> {shlex.quote(str(events))}"
    flags = ("--train_steps=1", "--hang_seconds=0.4", command)
    made = runs.done(pretrain(text_cache, tmp_path / "m", *flags))
    waiting.join()
    assert named
    assert "no progress: compiling (update 1) for 0:" in made.stderr


class Unread:
    """A standard error that nobody reads."""

    def write(self, _):
        raise BrokenPipeError

    flush = write


def test_each_cause_of_a_hang_is_told_once_though_nobody_reads_the_lines(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Unread())
    causes = ["waiting for data", "waiting for data", "compiling", "compiling"]
    looks = iter(causes)
    over = threading.Event()

    def what(*_):
        return next(looks, None) or over.set() or causes[-1]

    monkeypatch.setattr(hang, "_what", what)
    run, told = activity.Activity(), []
    run.listeners.append(told.append)
    with hang.Hang(run, 0.01):
        assert over.wait(30)
    assert [each.name for each in told] == ["hang", "hang"]
    assert [each.message.partition(" for 0:")[0] for each in told] == causes[1:3]


@pytest.mark.slow
def test_processes_say_that_they_wait_for_one_another(text_cache, tmp_path):
    events, errors = tmp_path / "events", tmp_path / "errors"
    command = f"--on_event=cat >> {events}"
    flags = ("--train_steps=100000", "--hang_seconds=1", command)
    with errors.open("w") as log:
        both = runs.start_all(pretrain(text_cache, tmp_path / "m", *flags), stderr=log)
        try:
            assert wait_for((tmp_path / "m" / "checkpoint_5").exists, both[0])
            both[1].send_signal(signal.SIGSTOP)

            def waits():
                return [each for each in heard(events) if each["step"] > 5]

            assert wait_for(waits, both[0])
            assert [(each["event"], each["process"]) for each in waits()] == [("hang", 0)]
        finally:
            for each in both:
                each.kill()
                each.communicate()  # closes its pipe
    said = errors.read_text()
    assert "process 0 of 2: no progress: update " in said
    assert "block_until_ready" in said


# --- events ---


@pytest.fixture
def spoiling(monkeypatch):
    """Returns a function that makes the losses of updates NaN."""

    def spoil(*updates):
        steps = iter(range(1, 100))

        def put(program, batch, _before=loop.Program.put):
            if next(steps) in updates:
                weights = batch["decoder_loss_weights"] * np.float32(np.nan)
                batch = {**batch, "decoder_loss_weights": weights}
            return _before(program, batch)

        monkeypatch.setattr(loop.Program, "put", put)

    return spoil


def names(events):
    return [(each["event"], each["step"]) for each in events]


def test_a_command_hears_of_events(text_cache, tmp_path, spoiling):
    model_dir, path = tmp_path / "model", tmp_path / "events"
    variables = '"$PALIMPSEST_EVENT $PALIMPSEST_STEP $PALIMPSEST_MODEL_DIR $PALIMPSEST_MESSAGE"'
    said = tmp_path / "said"
    command = f"--on_event=cat >> {path}; echo {variables} >> {said}; exit 3"
    flags = ("--evaluation.every_steps=3", "--checkpoint.best_metric=loss", command)
    spoiling(2)
    made = runs.run(pretrain(text_cache, model_dir, *flags, "--train_steps=6"))
    assert made.returncode == 2
    assert names(heard(path)) == [("started", 0), ("nonfinite", 1), ("failed", 1)]
    assert "update 2 was rejected: gradients/" in heard(path)[1]["message"]
    # Neither the failing command nor its text changed what the run said of itself.
    for name in ("started", "nonfinite", "failed"):
        assert f"--on_event: {name}: exit code 3: it said nothing\n" in made.stderr
    path.unlink()
    spoiling()
    runs.done(pretrain(text_cache, model_dir, *flags, "--train_steps=6"))
    assert names(heard(path)) == [("resumed", 1), ("best", 3), ("best", 6), ("finished", 6)]
    assert heard(path)[1]["message"].endswith(" is the best so far")
    assert {each["model_dir"] for each in heard(path)} == {str(model_dir)}
    lines = said.read_text().splitlines()
    assert lines[0] == f"started 0 {model_dir} starts from initial parameters"
    assert lines[3] == f"resumed 1 {model_dir} resumes from checkpoint 1"


def test_skipped_updates_and_preemptions_are_events(text_cache, tmp_path, spoiling, monkeypatch):
    path = tmp_path / "events"
    command = f"--on_event=cat >> {path}; echo no such hook >&2; false"
    spoiling(2, 3)
    before = activity.advanced

    def terminated(step=None):
        before(step)
        if step == 5:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(activity, "advanced", terminated)
    flags = ("--on_nan=skip", "--metrics.every_steps=4", command)
    made = runs.run(pretrain(text_cache, tmp_path / "model", *flags))
    assert made.returncode == 75, made.stderr
    assert names(heard(path)) == [("started", 0), ("skipped", 4), ("preempted", 5)]
    assert heard(path)[1]["message"] == "2 updates were not finite, up to 4"
    assert "--on_event: started: exit code 1: no such hook\n" in made.stderr
    assert read_metrics(str(tmp_path / "model"))[0]["metrics"]["skipped_updates"] == 2


def test_a_failed_checkpoint_is_an_event(text_cache, tmp_path, monkeypatch):
    from trainer.checkpoints.checkpoint import shutil

    path = tmp_path / "events"
    full = type("Usage", (), {"free": 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    flags = (f"--on_event=cat >> {path}", "--train_steps=6")
    made = runs.run(pretrain(text_cache, tmp_path / "model", *flags))
    assert made.returncode == 2
    assert [each["event"] for each in heard(path)] == ["started", "checkpoint_failed", "failed"]
    assert "checkpoint_5: " in heard(path)[1]["message"]
    assert "the disk is full" in heard(path)[1]["message"]
