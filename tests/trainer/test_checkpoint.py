"""Checkpoints: which are kept, what they hold, and the checks when a run resumes."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tasks.terminal.command_line import UserError
from trainer.checkpoint import Checkpoints
from trainer.config import CheckpointConfig
from trainer.engine.guard import new_guard
from trainer.engine.step import TrainState
from trainer.pretrain import build_config
from trainer.setup import prepare

STATE = TrainState(
    step=jnp.int32(0), params={"w": jnp.ones(3)}, opt_state=(), metrics={}, guard=new_guard()
)


def run_of(model_dir):
    config, _ = build_config("t5_1_1_tiny", [f"--model_dir={model_dir}"])
    return SimpleNamespace(config=config, data=SimpleNamespace(fingerprints={}, record={}))


def train(model_dir, policy, losses, first=0):
    """Saves steps 1, 2, … with these evaluation losses; returns the steps that are kept."""
    run, checkpoints = run_of(model_dir), Checkpoints(str(model_dir), policy)
    if first:
        checkpoints.check_resumable(first, run)
    for step, loss in enumerate(losses, first + 1):
        checkpoints.improved(step, {"loss": loss, "accuracy": loss})
        checkpoints.save(step, STATE, run)
    checkpoints.close()
    reader = Checkpoints(str(model_dir), writable=False)
    steps = reader.steps()
    reader.close()
    return steps


LOSSES = [5.0, 3.0, 1.0, 2.0, 4.0, 4.0, 4.0]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (CheckpointConfig(keep=2), [6, 7]),
        (CheckpointConfig(keep=None), [1, 2, 3, 4, 5, 6, 7]),
        (CheckpointConfig(keep=1, keep_every_steps=2), [2, 4, 6, 7]),
        (CheckpointConfig(keep=1, best_metric="loss"), [3, 7]),
        (CheckpointConfig(keep=1, best_metric="accuracy"), [1, 7]),
        (CheckpointConfig(keep=1, keep_every_steps=5, best_metric="loss"), [3, 5, 7]),
    ],
)
def test_the_newest_the_periodic_and_the_best_are_kept(policy, kept, tmp_path):
    assert train(tmp_path, policy, LOSSES) == kept


def test_a_resumed_run_remembers_the_best(tmp_path):
    policy = CheckpointConfig(keep=1, best_metric="loss")
    assert train(tmp_path, policy, [2.0, 1.0, 3.0]) == [2, 3]
    assert train(tmp_path, policy, [1.5, 1.5], first=3) == [2, 5]
    assert train(tmp_path, policy, [0.5, 1.5], first=5) == [6, 7]
    # The best by one metric is not compared with the best by another.
    other = CheckpointConfig(keep=1, best_metric="accuracy")
    assert train(tmp_path, other, [0.1, 0.05], first=7) == [8, 9]
    # Without a metric, no checkpoint is kept for being the best.
    assert train(tmp_path, CheckpointConfig(keep=1), [0.0], first=9) == [10]


def test_a_missing_metric_is_named(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(best_metric="bits_per_byte"))
    with pytest.raises(UserError, match=r"best_metric=bits_per_byte.* loss"):
        checkpoints.improved(1, {"loss": 1.0, "tokens": 5})
    checkpoints.close()


def test_another_vocabulary_is_rejected(text_cache, tmp_path):
    flags = [f"--model_dir={tmp_path}", "--task=python_docs_span_corruption"]
    config, origins = build_config("t5_1_1_tiny", [*flags, f"--cache_dir={text_cache}"])
    run = prepare(config, origins)
    checkpoints = Checkpoints(str(tmp_path), config.checkpoint)
    checkpoints.save(1, STATE, run)
    checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path), config.checkpoint)
    checkpoints.check_resumable(1, run)
    (file,) = (tmp_path / "checkpoint_1" / "run").glob("metadata")
    stored = json.loads(file.read_text())
    known = run.data.tasks[0].manifest.plan.vocabulary.sha256
    assert stored["vocabulary_sha256"] == known
    file.write_text(json.dumps({**stored, "vocabulary_sha256": "0" * 64}))
    with pytest.raises(UserError, match="the vocabulary has changed"):
        checkpoints.check_resumable(1, run)
    checkpoints.close()
