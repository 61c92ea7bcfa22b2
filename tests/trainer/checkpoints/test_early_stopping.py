"""The best checkpoint, early stopping and lower rates: what they decide, and that it is resumed."""

import itertools
import json
import math
import shutil
import signal
import sys
import time
import types

import pytest

from tasks.metrics.metric import Metric
from tasks.terminal.command_line import UserError
from tests.support.runs import config_of, curve, done, metadata, program_of, start, state, stub
from tests.support.trees import assert_equal
from tests.trainer.engine.test_stopping import pretrain
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.early_stopping import Watch, flattened
from trainer.config import CheckpointConfig, PlateauConfig, StoppingConfig


def followed(values, metric="loss", **settings):
    """Returns the watch after evaluations with these values."""
    stopping = StoppingConfig(metric, **settings)
    watch = Watch(CheckpointConfig(best_metric=metric), stopping)
    for step, value in enumerate(values, 1):
        watch.see(step, {"loss": value, "bleu": value})
    return watch


@pytest.mark.parametrize(
    ("values", "metric", "settings", "exhausted", "best"),
    [
        ([3, 2, 2, 2], "loss", {"patience": 2}, True, 2),
        ([3, 2, 2, 1], "loss", {"patience": 2}, False, 4),
        ([3, 2.5, 2.4], "loss", {"patience": 2, "min_delta": 1}, True, 3),
        ([3, 2.5, 1.9], "loss", {"patience": 2, "min_delta": 1}, False, 3),
        ([1, 2, 3], "bleu", {"patience": 1}, False, 3),
        ([1, 2, 3], "min:bleu", {"patience": 2}, True, 1),
        ([2, math.nan, math.nan], "loss", {"patience": 2}, True, 1),
    ],
)
def test_patience_counts_evaluations_without_improvement(values, metric, settings, exhausted, best):
    watch = followed(values, metric, **settings)
    assert watch.exhausted == exhausted
    assert watch.best.step == best


def test_a_value_that_is_no_number_is_never_the_best():
    watch = followed([math.nan, 3, 2], patience=2)
    assert not watch.exhausted
    assert watch.best.step == 3
    watch = followed([math.nan, math.nan], patience=2)
    assert watch.best is None
    assert watch.exhausted
    assert "was not a number for 2 evaluations" in watch.why_exhausted


def test_a_metric_that_does_not_say_which_way_it_is_better_is_refused(monkeypatch):
    module = types.ModuleType("own_metrics")
    nothing = lambda targets, predictions: {}  # noqa: E731
    module.METRICS = (
        Metric("my_error", nothing, lower_is_better=True),
        Metric("other", nothing),
        Metric("sum", nothing, lower_is_better=True, values=("first", "second")),
    )
    monkeypatch.setitem(sys.modules, "own_metrics", module)

    def watch(metric):
        return Watch(CheckpointConfig(best_metric=metric), task_module="own_metrics")

    # Higher values used to be taken for better ones.
    falling = watch("my_error")
    assert [falling.see(step, {"my_error": 9 - step}) for step in range(3)] == [True] * 3
    assert watch("task/second").see(1, {"task/second": 1.0})
    for unknown in ("other", "sum", "tokens", "task/other"):
        with pytest.raises(UserError, match=f"{unknown}: it is unknown .* min:{unknown}"):
            watch(unknown)
        assert watch(f"max:{unknown}").see(1, {unknown: 1.0})


def test_the_rate_drops_by_its_factor_to_its_minimum():
    plateau = PlateauConfig("loss", patience=2, factor=0.1, minimum_share=0.05)
    watch, scales = Watch(CheckpointConfig(), plateau=plateau), []
    for step, loss in enumerate([3, 3, 3, 2, 2, 2, 2, 2]):
        watch.see(step, {"loss": loss})
        scales.append(watch.rate_scale)
    assert scales == [1, 1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.05]


def test_a_recalled_watch_goes_on_exactly():
    config = (CheckpointConfig(best_metric="loss"), StoppingConfig("bleu"), PlateauConfig("loss"))
    values = [1 / 3, 0.1, 0.2, 0.30000000000000004, 0.4]
    for cut in range(len(values)):
        straight, broken = Watch(*config), Watch(*config)
        for step, value in enumerate(values):
            if step == cut:
                stored = json.loads(json.dumps(broken.record()))
                broken = Watch(*config)
                broken.recall(stored)
            for watch in (straight, broken):
                watch.see(step, {"loss": value, "bleu": value})
        assert broken.record() == straight.record()
    # Another metric begins anew.
    other = Watch(CheckpointConfig(), StoppingConfig("loss", patience=9))
    other.recall(stored)
    assert other.record()["watch"]["stopping"]["stale"] == 0


def test_metrics_of_tasks_and_unknown_ones():
    found = flattened({"validation": {"loss": 2.0}, "validation/cola": {"loss": 3.0}})
    assert found == {"loss": 2.0, "cola/loss": 3.0}
    watch = Watch(CheckpointConfig(best_metric="cola/loss"))
    assert watch.see(1, found)
    assert not watch.see(2, found)
    with pytest.raises(UserError, match=r"stopping.metric=bleu.* loss, cola/loss"):
        Watch(CheckpointConfig(), StoppingConfig("bleu")).see(1, found)


@pytest.mark.processes
def test_a_state_is_the_same_before_and_after_its_evaluation_lowers_the_rate(tmp_path):
    """SIGTERM ends a run before the evaluation; the resumed one then evaluates the saved state."""
    config = config_of("--plateau.metric=loss", "--model.vocab_size=64")
    program, saved = program_of(config), []
    begun = program.initial_state()
    for scale in (1.0, 0.5):
        folder = tmp_path / str(scale)
        checkpoints = Checkpoints(str(folder))
        run = stub(config)
        checkpoints.save(1, program.with_rate_scale(begun, scale), run)
        checkpoints.close()
        saved.append(state(folder, 1))
    assert_equal(*saved)


STEPS = 30
# Nothing improves by as much as 9: the rate drops at every second evaluation, and the metric of
# early stopping is out of patience at the twelfth, which 30 updates do not reach.
WATCHED = (
    *("--plateau.metric=accuracy", "--plateau.min_delta=9", "--plateau.factor=0.3"),
    *("--stopping.metric=loss", "--stopping.min_delta=9", "--stopping.patience=11"),
    *("--optimizer.name=adamw", "--optimizer.learning_rate=0.003", "--optimizer.warmup_steps=5"),
    *("--checkpoint.every_steps=6", "--checkpoint.keep=9", "--evaluation.batches=1"),
)


def watched(cache, model_dir, *flags):
    return pretrain(cache, model_dir, f"--train_steps={STEPS}", *WATCHED, *flags)


@pytest.mark.slow
def test_thirty_updates_equal_twelve_a_kill_and_eighteen(text_cache, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done(watched(text_cache, whole))
    rates = [line["metrics"]["learning_rate"] for line in curve(whole) if line["split"] == "train"]
    drops = sum(after < before * 0.5 for before, after in itertools.pairwise(rates))
    assert drops == 4

    process = start(watched(text_cache, killed))
    while not (killed / "checkpoint_12").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for later in (18, 24, 30):  # it may have come further before the signal
        shutil.rmtree(killed / f"checkpoint_{later}", ignore_errors=True)
    assert "resumes from checkpoint 12" in done(watched(text_cache, killed)).stdout
    assert curve(killed) == curve(whole)
    assert_equal(state(killed, STEPS), state(whole, STEPS))
    for name in ("best", "watch"):
        assert metadata(killed, STEPS)[name] == metadata(whole, STEPS)[name]
    assert metadata(whole, STEPS)["watch"]["stopping"]["stale"] == 9
    assert metadata(whole, STEPS)["watch"]["rate_scale"] == pytest.approx(0.01)

    # With less patience, the finished run is over; with the same and more updates, it goes on.
    early = watched(text_cache, tmp_path / "early", "--stopping.patience=3")
    assert "stopped early at step 12: loss has not improved" in done(early).stdout
    assert "training is finished, early: loss has not improved" in done(early).stdout
