"""The loop's schedule: what a run does after which update, and how it stops."""

import contextlib
import itertools
import signal
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from tasks.terminal.command_line import UserError
from tests.support.processes import started
from tests.support.runs import flags_of
from trainer import loop
from trainer.config import Config
from trainer.config.field_paths import replace_all
from trainer.config.presets import model_preset
from trainer.engine.stopping import EXIT_PREEMPTED

LAST = 6
SIGNALLED = UserError("SIGTERM")


class State(NamedTuple):
    step: int
    params: None = None


class Run:
    """A run that evaluates every 2 updates, saves every 3 and only notes what it is asked to do.

    Attributes:
      begin: the step of its checkpoint, which was saved `evaluated` or not.
      batches: step -> what happens instead of its batch: an error, or SIGNALLED while it waits.
      updates: steps during whose update SIGTERM arrives.
      results: step -> loss on the validation split, an error, or SIGNALLED during the evaluation.
      events: what the run did, in order.
    """

    def __init__(self, begin=0, evaluated=True, batches=(), updates=(), results=(), **values):
        settings = {"train_steps": LAST, "model_dir": "model", "evaluation.every_steps": 2}
        config = Config(preset="t5_1_1_tiny", model=model_preset("t5_1_1_tiny"))
        self.config = replace_all(config, settings | {"checkpoint.every_steps": 3} | values)
        self.begin, self.evaluated = begin, evaluated
        self.batches, self.updates, self.results = dict(batches), updates, dict(results)
        self.events = []
        self.data = SimpleNamespace(
            training=self.training, close=lambda: self.note("close data"), record={}
        )

    def note(self, *words):
        self.events.append(" ".join(map(str, words)))

    def training(self, first, waiting):
        for step in itertools.count(first + 1):
            error = self.batches.get(step)
            if error is SIGNALLED:
                signal.raise_signal(signal.SIGTERM)
                assert waiting.stopping()
                return
            if error:
                raise error
            yield step

    def update(self, state, batch):
        assert batch == state.step + 1
        if batch in self.updates:
            signal.raise_signal(signal.SIGTERM)
        return State(batch)

    def evaluate(self, params, step, stopping):
        found = self.results.get(step, 1.0)
        if found is SIGNALLED:
            signal.raise_signal(signal.SIGTERM)
            assert stopping()
            return None
        if isinstance(found, UserError):
            raise found
        return {"validation": {"loss": found}}

    def report(self, step, state):
        assert state == State(step)
        self.note("report", step)
        return state


class Checkpoints:
    metrics_digest = None

    def __init__(self, run, watch):
        self.run, self.watch, self.evaluated = run, watch, run.evaluated
        self.saved = [run.begin] if run.begin else []

    def steps(self):
        return self.saved

    def save(self, step, state, run, evaluated, metrics_digest):
        assert (state, metrics_digest) == (State(step), f"lines to {step}")
        self.saved.append(step)
        self.run.note("save", step, *[] if evaluated else ["unevaluated"])

    def record_evaluation(self, step):
        self.run.note("record", step)

    def close(self):
        self.run.note("close checkpoints")


@pytest.fixture
def train(monkeypatch):
    """Returns a function that trains a `Run`; it returns the exit code."""

    def trained(run):
        blocking = SimpleNamespace(timed=contextlib.nullcontext)
        speed = SimpleNamespace(blocking=blocking, restart=lambda step: None)
        parts = {
            "_locked": lambda folder: contextlib.nullcontext(lambda: None),
            "processes": SimpleNamespace(check_shared=lambda folder: None, is_first=lambda: False),
            "Checkpoints": lambda folder, policy, watch: Checkpoints(run, watch),
            "Program": lambda run_: SimpleNamespace(
                host_part=(),
                mesh=None,
                train_step=run.update,
                put=lambda rows: rows,
                with_rate_scale=lambda state, scale: state,
            ),
            "begin": lambda *_: (SimpleNamespace(step=run.begin), State(run.begin)),
            "MetricsWriter": lambda *_: SimpleNamespace(
                flush=lambda: run.note("flush"),
                close=lambda: run.note("close metrics"),
                digest=lambda step: f"lines to {step}",
            ),
            "Reports": lambda *_: SimpleNamespace(
                before=lambda *_: None,
                after=run.report,
                settle=lambda step, state: run.note("settle", step),
                evaluations=lambda step, results: run.note("evaluated", step),
                speed=speed,
                note="",
            ),
            "Evaluation": lambda *_: run.evaluate,
        }
        for name, part in parts.items():
            monkeypatch.setattr(loop, name, part)
        return loop.train(run, {})

    return trained


CLOSED = ["close checkpoints", "close metrics", "close data"]


def saved(step, *words):
    return [f"settle {step}", "flush", " ".join(["save", str(step), *words])]


def evaluated(step):
    return [f"settle {step}", f"evaluated {step}"]


def test_a_run_evaluates_and_saves_when_it_is_due_and_at_the_end(train, capsys):
    run = Run()
    assert train(run) == 0
    assert run.events == [
        *["report 1", "report 2", *evaluated(2), "report 3", *saved(3)],
        *["report 4", *evaluated(4), "report 5"],
        *["report 6", *evaluated(6), *saved(6), *CLOSED],
    ]
    assert capsys.readouterr().err == ""


def test_the_best_state_is_saved_at_once(train):
    values = {"checkpoint.best_metric": "loss", "checkpoint.every_steps": 0}
    run = Run(results={2: 3.0, 4: 4.0, 6: 2.0}, **values)
    train(run)
    assert [event for event in run.events if event.startswith("save")] == ["save 2", "save 6"]


@pytest.mark.parametrize(
    ("stopped", "begins", "step"),
    [
        ({"updates": [5]}, ["report 5", *saved(5)], 5),
        ({"updates": [3]}, ["report 3", *saved(3)], 3),
        ({"updates": [4]}, ["report 4", "settle 4", *saved(4, "unevaluated")], 4),
        ({"updates": [6]}, ["report 6", "settle 6", *saved(6, "unevaluated")], 6),
        ({"results": {4: SIGNALLED}}, ["settle 4", *saved(4, "unevaluated")], 4),
        ({"batches": {6: SIGNALLED}}, ["report 5", *saved(5)], 5),
        ({"batches": {4: SIGNALLED}}, ["report 3", *saved(3)], 3),
    ],
)
def test_sigterm_saves_the_newest_state_once(train, capsys, stopped, begins, step):
    run = Run(**stopped)
    assert train(run) == EXIT_PREEMPTED
    assert run.events[-len(begins) - len(CLOSED) :] == [*begins, *CLOSED]
    said = f"SIGTERM: saved step {step}; run the same command to resume\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("stopped", "code", "events", "said"),
    [
        ({"batches": {1: SIGNALLED}}, EXIT_PREEMPTED, [], "SIGTERM: no update has been made yet\n"),
        ({"updates": [LAST], "evaluation.every_steps": 0}, 0, [*saved(LAST)], ""),
    ],
)
def test_sigterm_with_nothing_left_to_save_or_to_do(train, capsys, stopped, code, events, said):
    run = Run(**stopped)
    assert train(run) == code
    assert run.events[-len(events) - len(CLOSED) :] == [*events, *CLOSED]
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("failing", "says", "last"),
    [
        ({"batches": {6: UserError("damaged")}}, "damaged", "save 5"),
        ({"results": {4: UserError("damaged")}}, "damaged", "save 4 unevaluated"),
        ({"stopping.metric": "accuracy"}, "these tasks do not have this metric", "save 2"),
    ],
)
def test_an_error_ends_the_run_when_its_state_is_saved(train, failing, says, last):
    run = Run(**failing)
    with pytest.raises(UserError, match=says):
        train(run)
    assert run.events[-len(CLOSED) - 1 :] == [last, *CLOSED]


def test_a_run_that_no_longer_improves_ends_early(train, capsys):
    values = {"stopping.metric": "loss", "stopping.patience": 1}
    run = Run(results={2: 2.0, 4: 3.0}, **values)
    assert train(run) == 0
    assert run.events[-len(CLOSED) - 3 :] == [*saved(4), *CLOSED]
    said = "stopped early at step 4: loss has not improved on 2 for 1 evaluations"
    assert said in capsys.readouterr().out


def test_an_evaluation_that_is_owed_comes_first(train):
    run = Run(begin=4, evaluated=False)
    train(run)
    assert run.events[:4] == [*evaluated(4), "record 4", "report 5"]


@pytest.mark.parametrize("begin", [4, LAST])
def test_an_owed_evaluation_that_is_interrupted_stays_owed(train, capsys, begin):
    run = Run(begin=begin, evaluated=False, results={begin: SIGNALLED})
    assert train(run) == EXIT_PREEMPTED
    assert run.events == [f"settle {begin}", *CLOSED]
    assert f"SIGTERM: saved step {begin}" in capsys.readouterr().err


def test_an_owed_evaluation_without_the_metric_stays_owed(train):
    run = Run(begin=4, evaluated=False, **{"stopping.metric": "accuracy"})
    with pytest.raises(UserError, match="do not have this metric"):
        train(run)
    assert run.events == [*evaluated(4), *CLOSED]


RUN = """
import sys
from trainer.pretrain import main
assert not main(sys.argv[1:])
foreign = "trainer.annexes.", "trainer.huggingface", "trainer.initialization.init_from"
loaded = [name for name in sys.modules if name.startswith(foreign)]
def is_settings(name):  # of annexes, which are there, as nothing else of them is
    _, annexed, *inner = name.split(".")
    return annexed == "annexes" and inner[1:] in ([], ["options"])
print("imported", *(name for name in loaded if not is_settings(name)))
"""


@pytest.mark.processes
def test_a_run_that_starts_from_nothing_imports_no_foreign_format(text_cache, tmp_path):
    flags = ("--preset=t5_1_1_tiny", "--train_steps=1", "--metrics.tensorboard=false")
    made = started("-c", RUN, *flags, *flags_of(text_cache, tmp_path))
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1] == "imported"
