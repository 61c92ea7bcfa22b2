"""Runs that start from checkpoints of this trainer and from transformers, and what does not fit."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS
from tests.support import own_checkpoints
from tests.support.own_checkpoints import PARAMETERS, D, V
from tests.support.runs import config_of, stub, trained
from tests.support.runs import run_of as run_of_cache
from tests.support.trees import assert_equal
from trainer.checkpoints import metadata, stored
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.tensors import divided, held, mean, reshaped, stacked
from trainer.engine.program import Program
from trainer.initialization import init_from
from trainer.model.paths import named
from trainer.optim.plateau import set_rate_scale

pytestmark = pytest.mark.processes

SIZES = [f"--model.vocab_size={V}", "--train_steps=20", "--batch_size=2"]


def run_of(path, *flags, preset="t5_1_1_tiny"):
    """Returns a run without data, which init_from does not read."""
    config = config_of(*SIZES, f"--init_from={path}", *flags, preset=preset)
    return stub(config, vocab_size=V - 20)


def test_a_run_starts_from_another_with_exactly_its_state(text_cache, tmp_path):
    quiet = ("--batch_size=2", "--evaluation.every_steps=0", "--metrics.tensorboard=false")
    trained(text_cache, tmp_path / "one", *quiet, "--train_steps=2", lengths=(40, 12))
    ours = str(tmp_path / "one" / "checkpoint_2")
    (tmp_path / "one" / "checkpoint_200.orbax-checkpoint-tmp-1").mkdir()
    assert stored.find(str(tmp_path / "one")) == ours
    run = run_of_cache(text_cache, f"--init_from={ours}", "--train_steps=3")
    program = Program(run)
    begun = init_from.start(run).state(program)
    checkpoints = Checkpoints(str(tmp_path / "one"), writable=False)
    before = checkpoints.restore(2, program.abstract_state())
    checkpoints.close()
    for part in ("params", "opt_state", "step"):
        assert_equal(getattr(begun, part), getattr(before, part))
    assert "trained with" not in init_from.start(run).describe()
    scaled = dataclasses.replace(run.config.model, attention_scale=0.5, dropout_rate=0.1)
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, model=scaled))
    assert "it was trained with attention_scale 1.0: with" in init_from.start(other).describe()
    metadata.update(ours, vocabulary_sha256="0" * 64)
    with pytest.raises(UserError, match="trained with a different vocabulary"):
        init_from.start(run)


def test_what_does_not_fit_is_named(tmp_path):
    path = own_checkpoints.write(tmp_path / "own")

    def error_of(*flags, preset="t5_1_1_tiny"):
        with pytest.raises(UserError) as error:
            init_from.start(run_of(path, *flags, preset=preset))
        return str(error.value)

    assert error_of(f"--model.vocab_size={V + 128}") == (
        f"--init_from={path}: token_embedder/embedding has {V} rows, the model has {V + 128}; set "
        f"--model.vocab_size={V}: rows above the {V - 20} ids are padding"
    )
    assert "wi_0/kernel has shape (8, 16), but (8, 32)" in error_of("--model.mlp_dim=32")
    assert "lacks decoder/layers_0/mlp/wi/kernel (did you mean" in error_of(preset="t5_1_0_tiny")
    assert "has already made 10 steps, which count towards --train_steps=10" in error_of(
        "--train_steps=10"
    )
    with pytest.raises(UserError, match=r"has no table of relative positions per layer: leave out"):
        init_from.start(run_of(path, "--model.position=relative_per_layer"))
    with pytest.raises(UserError, match="neither is nor holds a checkpoint"):
        init_from.start(run_of(tmp_path / "nothing"))
    for flags, reason in (
        (["--optimizer.name=adamw", "--optimizer.learning_rate=0.001"], "optimizer.name=adamw"),
        (["--optimizer.beta1=0.9"], "it has no momentum of "),
        (["--init_from_state=false"], "init_from_state=false"),
    ):
        start = init_from.start(run_of(path, *flags))
        assert reason in start.reset
        assert reason in start.describe()


@pytest.mark.parametrize("scanned", [False, True])
def test_layers_are_stacked_as_the_model_has_them(scanned, tmp_path):
    path = own_checkpoints.write(tmp_path)
    flags = ("--optimizer.min_dim_size_to_factor=8", f"--model.scan_layers={scanned}")
    start = init_from.start(run_of(path, *flags))
    assert start.reset is None
    kernel = "encoder/layers_1/mlp/wo/kernel"
    found = start.parameters["encoder/encoder/mlp/wo/kernel" if scanned else kernel].whole()
    np.testing.assert_array_equal(found[:, 1] if scanned else found, PARAMETERS[kernel])


def test_a_hugging_face_model_is_loaded(monkeypatch, tmp_path):
    asked = []

    def load(path, model):
        asked.append((path, model.vocab_size))
        return unflatten_dict(PARAMETERS, sep="/")

    monkeypatch.setattr("trainer.huggingface.load", load)
    run = run_of("hf:some/folder", "--model.scan_layers=true")
    run.converter = SimpleNamespace(special=T5_IDS)
    monkeypatch.setattr("trainer.huggingface.model_config", lambda path: run.config.model)
    monkeypatch.setattr("trainer.huggingface.special_ids_of", lambda path: {})
    start = init_from.start(run)
    assert asked == [("some/folder", V)]
    assert (start.step, start.reset) == (0, "none is stored")
    kernel = start.parameters["encoder/encoder/mlp/wo/kernel"]
    assert kernel.shape == (16, 2, D)
    np.testing.assert_array_equal(
        kernel.read((slice(2, 5), slice(1, 2), slice(None))),
        PARAMETERS["encoder/layers_1/mlp/wo/kernel"][2:5, None],
    )


def test_parts_of_tensors_equal_parts_of_the_array():
    rng = np.random.default_rng(0)
    array = rng.normal(size=(4, 3, 6))
    layers = [held(array[:, number]) for number in range(3)]
    index = (slice(1, 3), slice(1, None), slice(0, 6, 2))
    for tensor, expected in (
        (stacked(layers, 1), array),
        (stacked(divided(held(array), 2), 2), array),
        (mean(held(rng.normal(size=(2, 4, 3, 6))), 0), None),
        (reshaped(held(array), (2, 2, 18)), array.reshape(2, 2, 18)),
    ):
        expected = tensor.whole() if expected is None else expected
        assert tensor.shape == expected.shape
        np.testing.assert_array_equal(tensor.whole(), expected)
        np.testing.assert_array_equal(tensor.read(index), expected[index])


@pytest.mark.parametrize("plateau", [(), ("--plateau.metric=loss", "--evaluation.every_steps=1")])
def test_a_run_whose_rate_was_dropped_gives_its_moments_but_not_its_rate(
    plateau, text_cache, tmp_path
):
    adamw = ("--optimizer.name=adamw", "--optimizer.learning_rate=0.003")
    watched = ("--plateau.metric=loss", "--evaluation.every_steps=1")
    source = run_of_cache(text_cache, f"--model_dir={tmp_path}", *adamw, *watched)
    state = Program(source).initial_state()
    moved = jax.tree.map(lambda leaf: leaf + 1, state.opt_state)
    state = set_rate_scale(dataclasses.replace(state, opt_state=moved), 0.25)
    checkpoints = Checkpoints(str(tmp_path), source.config.checkpoint)
    checkpoints.save(4, dataclasses.replace(state, step=state.step + 4), source)
    checkpoints.close()

    run = run_of_cache(text_cache, f"--init_from={tmp_path}/checkpoint_4", *adamw, *plateau)
    start = init_from.start(run)
    assert "with the optimizer state" in start.describe()
    begun = start.state(Program(run)).opt_state
    assert np.array_equal(jax.tree.leaves(begun)[2], jax.tree.leaves(moved)[2])
    scales = [each for name, each in named(begun).items() if name.endswith("/rate_scale")]
    assert len(scales) == 2 * bool(plateau)
    assert all(float(scale) == 1 for scale in scales)


@pytest.mark.parametrize("added", [True, False])
def test_moments_are_kept_if_clipping_is_added_or_left_out(added, text_cache, tmp_path):
    adamw = ("--optimizer.name=adamw", "--optimizer.learning_rate=0.003")
    clipping = ("--optimizer.clip_norm=1", "--optimizer.clip_value=1")
    before, flags = ((), clipping) if added else (clipping, ())
    source = run_of_cache(text_cache, f"--model_dir={tmp_path}", *adamw, *before)
    state = Program(source).initial_state()
    moved = jax.tree.map(lambda leaf: leaf + 1, state.opt_state)
    checkpoints = Checkpoints(str(tmp_path), source.config.checkpoint)
    checkpoints.save(4, dataclasses.replace(state, opt_state=moved, step=state.step + 4), source)
    checkpoints.close()
    run = run_of_cache(text_cache, f"--init_from={tmp_path}/checkpoint_4", *adamw, *flags)
    start = init_from.start(run)
    assert "with the optimizer state" in start.describe()
    begun = start.state(Program(run)).opt_state
    assert_equal(jax.tree.leaves(begun), jax.tree.leaves(moved))
