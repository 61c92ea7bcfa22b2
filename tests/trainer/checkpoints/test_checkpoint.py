"""Checkpoints: which are kept, what they hold, and the checks when a run resumes."""

import contextlib
import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support import runs
from tests.support.runs import config_of, stub
from tests.support.trees import same
from trainer import evaluate
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import CheckpointConfig
from trainer.engine.damage import Damaged
from trainer.engine.guard import new_guard
from trainer.engine.step import TrainState
from trainer.initialization.resume import begin

STATE = TrainState(
    step=jnp.int32(0), params={"w": jnp.ones(3)}, opt_state=(), metrics={}, guard=new_guard()
)


def run_of(model_dir, *flags):
    return stub(config_of(f"--model_dir={model_dir}", *flags))


def train(model_dir, policy, losses, first=0):
    """Saves steps 1, 2, … with these evaluation losses; returns the steps that are kept."""
    run, checkpoints = run_of(model_dir), Checkpoints(str(model_dir), policy)
    if first:
        checkpoints.check_resumable(first, run)
    for step, loss in enumerate(losses, first + 1):
        checkpoints.watch.see(step, {"loss": loss, "accuracy": loss})
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


def test_a_state_that_is_not_finite_is_neither_saved_nor_sound(tmp_path, monkeypatch):
    run, checkpoints = run_of(tmp_path), Checkpoints(str(tmp_path))
    lost = dataclasses.replace(STATE, opt_state=({"m": jnp.array([0, jnp.nan])},))
    sound = dataclasses.replace(STATE, opt_state=({"m": jnp.zeros(2)},))
    checkpoints.save(1, sound, run)
    with pytest.raises(UserError, match=r"opt_state/0/m is not finite after.* is checkpoint_1: "):
        checkpoints.save(2, lost, run)
    assert checkpoints.steps() == [1]
    with monkeypatch.context() as patched:  # as written by an earlier version
        patched.setattr("trainer.engine.guard.nonfinite", lambda state: None)
        checkpoints.save(3, lost, run)
        checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path))
    with pytest.raises(Damaged, match="opt_state/0/m is not finite"):
        checkpoints.restore(3, sound)
    assert checkpoints.newest_sound(4, run, sound) == 1
    checkpoints.close()


def test_a_checkpoint_without_a_best_has_none(tmp_path):
    """Also after one that has was looked at and found damaged."""
    run, checkpoints = run_of(tmp_path), Checkpoints(str(tmp_path))
    checkpoints.save(1, STATE, run)
    checkpoints.close()
    policy = CheckpointConfig(keep=1, best_metric="loss")
    assert train(tmp_path, policy, [1.0], first=1) == [2]
    # Saving must not remove the checkpoint that is looked at.
    checkpoints = Checkpoints(str(tmp_path), dataclasses.replace(policy, keep=2))
    checkpoints.save(3, STATE, run)
    checkpoints.check_resumable(2, run)
    assert not checkpoints.watch.see(3, {"loss": 1.0, "accuracy": 1.0})
    metadata.update(checkpoints.path(2), best=None)
    checkpoints.check_resumable(2, run)
    assert checkpoints.watch.see(3, {"loss": 1.0, "accuracy": 1.0})
    checkpoints.record_evaluation(2)
    assert metadata.read(checkpoints.path(2))["best"]["step"] == 3
    checkpoints.close()


def test_another_vocabulary_is_rejected(text_cache, tmp_path):
    run = runs.run_of(text_cache, f"--model_dir={tmp_path}")
    checkpoints = Checkpoints(str(tmp_path), run.config.checkpoint)
    checkpoints.save(1, STATE, run)
    checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path), run.config.checkpoint)
    checkpoints.check_resumable(1, run)
    known = run.data.tasks[0].manifest.plan.vocabulary.sha256
    assert metadata.read(checkpoints.path(1))["vocabulary_sha256"] == known
    metadata.update(checkpoints.path(1), vocabulary_sha256="0" * 64)
    with pytest.raises(UserError, match="the vocabulary has changed"):
        checkpoints.check_resumable(1, run)
    checkpoints.close()


def abstract_of(state):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), state
    )


def state_of(step):
    numbers = np.random.default_rng(step).normal(size=(64, 48)).astype(np.float32)
    params = {"w": jnp.asarray(numbers), "b": jnp.asarray(numbers[0], jnp.bfloat16)}
    return dataclasses.replace(STATE, step=jnp.int32(step), params=params)


ABSTRACT = abstract_of(state_of(0))
PROGRAM = SimpleNamespace(
    abstract_state=lambda: ABSTRACT, with_rate_scale=lambda state, scale: state
)


@pytest.fixture
def model_dir(tmp_path):
    """A model directory with checkpoints of steps 1, 2 and 3."""
    folder = tmp_path / "model"
    checkpoints = Checkpoints(str(folder))
    for step in (1, 2, 3):
        checkpoints.save(step, state_of(step), run_of(folder))
    checkpoints.close()
    return folder


def damages(data):
    """Yields (kind, content); None stands for a deleted file."""
    yield from (("gone", None), ("empty", b""), ("cut", data[: len(data) // 2]))
    yield "zeroed", bytes(len(data))
    generator = np.random.default_rng(len(data))
    for bit in generator.integers(0, 8 * len(data), 4) if data else ():
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(flipped)


@pytest.mark.processes
def test_damage_to_any_file_is_noticed_or_harmless(model_dir, capfd):
    folder = model_dir / "checkpoint_3"
    checkpoints = Checkpoints(str(model_dir), writable=False)
    noticed, messages = set(), []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for kind, content in damages(data):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            try:
                checkpoints.check_resumable(3, run_of(model_dir))
                assert same(checkpoints.restore(3, ABSTRACT), state_of(3)), (path, kind)
            except Damaged as error:
                messages.append(str(error))
                noticed.add(str(path.relative_to(folder)).partition("/d/")[0])
            path.write_bytes(data)
    checkpoints.close()
    assert all(str(folder) in text and len(text.splitlines()) == 1 for text in messages)
    assert noticed >= {"run/metadata", "state/_METADATA", "state/manifest.ocdbt", "state"}
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


def restored(model_dir, abstract=ABSTRACT):
    """Returns what is restored of the third checkpoint."""
    with contextlib.closing(Checkpoints(str(model_dir), writable=False)) as checkpoints:
        return checkpoints.restore(3, abstract)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("state", "step does not match its checksum; nor do 2 others"),
        (".", "is a copy of checkpoint_2"),
    ],
)
def test_arrays_of_another_checkpoint_are_noticed(model_dir, part, says):
    shutil.rmtree(model_dir / "checkpoint_3" / part)
    shutil.copytree(model_dir / "checkpoint_2" / part, model_dir / "checkpoint_3" / part)
    with pytest.raises(Damaged, match=says):
        restored(model_dir)


def test_another_model_is_not_damage(model_dir):
    other = {"w": jnp.zeros((64, 49)), "b": ABSTRACT.params["b"]}
    with pytest.raises(UserError, match=r"different model.*float32\[64,48\] params/w") as raised:
        restored(model_dir, dataclasses.replace(ABSTRACT, params=other))
    assert not isinstance(raised.value, Damaged)


def begun(model_dir, on_damage):
    run = run_of(model_dir, f"--checkpoint.on_damage={on_damage}")
    checkpoints = Checkpoints(str(model_dir), run.config.checkpoint)
    try:
        beginning, state = begin(run, checkpoints, PROGRAM)
        checkpoints.save(beginning.step + 1, state_of(beginning.step + 1), run)
        return beginning.step, state
    finally:
        checkpoints.close()


@pytest.mark.parametrize("file", ["run/metadata", "state/manifest.ocdbt"])
def test_the_newest_sound_one_is_offered_and_taken(model_dir, capsys, file):
    (model_dir / "checkpoint_3" / file).write_bytes(b"")
    before = sorted(path.name for path in model_dir.iterdir())
    with pytest.raises(UserError, match=r"checkpoint_3 is damaged .* checkpoint_2; run with"):
        begun(model_dir, "stop")
    assert sorted(path.name for path in model_dir.iterdir()) == before

    step, state = begun(model_dir, "fall_back")
    assert step == 2
    assert same(state, state_of(2))
    assert "renamed to damaged_checkpoint_3" in capsys.readouterr().err
    assert (model_dir / "damaged_checkpoint_3" / file).exists()
    # The same command again goes on where the run is.
    step, state = begun(model_dir, "fall_back")
    assert step == 3
    assert same(state, state_of(3))
    # A second damage of the same step does not replace the first.
    (model_dir / "checkpoint_4" / file).write_bytes(b"")
    (model_dir / "checkpoint_3" / file).write_bytes(b"")
    assert begun(model_dir, "fall_back")[0] == 2
    assert (model_dir / "damaged_checkpoint_3_2").exists()


def test_nothing_is_renamed_without_a_sound_checkpoint(model_dir):
    for step in (1, 2, 3):
        (model_dir / f"checkpoint_{step}" / "run" / "metadata").unlink()
    for on_damage in ("stop", "fall_back"):
        with pytest.raises(UserError, match="there is no sound one before it"):
            begun(model_dir, on_damage)
    assert (model_dir / "checkpoint_3").exists()


def test_checkpoints_of_earlier_versions_are_refused(model_dir):
    folder = model_dir / "checkpoint_3"
    file = folder / "run" / "metadata"
    stored = {
        name: value
        for name, value in json.loads(file.read_text()).items()
        if name not in ("checksums", "sha256")
    }
    file.write_text(json.dumps(stored))
    with pytest.raises(UserError, match="written by an earlier version"):
        restored(model_dir)


def test_an_output_that_cannot_be_written_ends_before_the_evaluation(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a folder"):
        evaluate.main(["--model_dir=none", f"--output={tmp_path}"])
    with pytest.raises(OSError, match="file"):
        evaluate.main(["--model_dir=none", f"--output={tmp_path}/file/metrics.json"])
