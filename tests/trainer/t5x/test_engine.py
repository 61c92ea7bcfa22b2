"""Tests checkpoints written for T5X, and T5X as the engine of a run."""

import dataclasses
import glob
import importlib.util
import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS
from tests.support.processes import completed
from trainer import export_t5x
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config import save_config
from trainer.config.from_flags import build_config
from trainer.engine.program import Program
from trainer.model.paths import path_name
from trainer.starting.resume import start
from trainer.t5x import engine, layout, read, write
from trainer.t5x.tensors import held

T5X = importlib.util.find_spec("t5x") is not None
STEP = 7


def config_of(*flags, preset="t5_1_1_tiny"):
    config, _ = build_config(
        preset, ["--model.vocab_size=128", "--train_steps=20", "--batch_size=2", *flags]
    )
    return config


def random_state(config):
    """Returns a checkpoint of one of our runs with random values."""
    run = types.SimpleNamespace(config=config)
    rng = np.random.default_rng(0)
    abstract = Program(run).abstract_state()

    def filled(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {
            path_name(path): held(
                np.int32(STEP) if leaf.dtype == "int32" else rng.random(leaf.shape).astype("f4")
            )
            for path, leaf in leaves
        }

    return read.Checkpoint(
        "", STEP, filled(abstract.params), state=filled(abstract.opt_state), run={}
    )


def values(checkpoint, shared=True):
    """Returns parameters and moments; `shared`: with one table of positions per stack."""
    parts = layout.read_parts(checkpoint)
    if shared:
        parts = layout.with_shared_positions("it", parts)
    return {
        f"{name} {part}": tensor.whole()
        for name, of_name in parts.items()
        for part, tensor in of_name.items()
    }


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("ours_scanned", [False, True])
def test_written_checkpoints_are_read_back(ours_scanned, scanned, tmp_path):
    config = config_of(
        "--optimizer.min_dim_size_to_factor=8",
        "--optimizer.beta1=0.9",
        f"--model.scan_layers={ours_scanned}",
    )
    ours = random_state(config)
    path = write.write(ours, config, str(tmp_path), scanned)
    assert path == f"{tmp_path}/checkpoint_{STEP}"
    theirs = read.load(str(tmp_path))
    assert theirs.step == STEP
    assert theirs.run is None
    names = theirs.parameters
    assert ("decoder/decoder/mlp/wo/kernel" in names) == scanned
    if scanned:
        assert names["encoder/encoder/attention/out/kernel"].shape == (4, 2, 3, 8)
        assert names["encoder/encoder/relpos_bias/rel_embedding"].shape == (4, 2, 32)
    # Every parameter has all four moments; T5X stores unused ones as [1].
    assert {tuple(sorted(kinds)) for kinds in theirs.moments.values()} == {
        ("m", "v", "v_col", "v_row")
    }
    before, after = (values(checkpoint) for checkpoint in (ours, theirs))
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)
    with pytest.raises(UserError, match="exists: delete it"):
        write.write(ours, config, str(tmp_path), scanned)


def test_moments_are_averaged_where_only_t5x_factors_them(tmp_path):
    """`scalable_t5` factors kernels of any size, we only large ones; the averages are exact."""
    config = config_of()
    ours = random_state(config)
    write.write(ours, config, str(tmp_path), scanned=True)
    moments = read.load(str(tmp_path)).moments["encoder/encoder/mlp/wi_0/kernel"]
    for layer in range(2):
        full = ours.state[f"0/v/encoder/layers_{layer}/mlp/wi_0/kernel"].whole()
        np.testing.assert_array_equal(moments["v_row"].whole()[:, layer], full.mean(1))
        np.testing.assert_array_equal(moments["v_col"].whole()[layer], full.mean(0))


def test_export_t5x_reports_what_it_wrote(tmp_path, capsys):
    model_dir = tmp_path / "model"
    config = config_of(
        f"--model_dir={model_dir}", "--optimizer.name=adamw", "--optimizer.learning_rate=0.001"
    )
    model_dir.mkdir()
    save_config(config, {})
    run = types.SimpleNamespace(
        config=config,
        data=types.SimpleNamespace(fingerprints={}, record={}, vocabulary_sha256=None),
    )
    state = Program(run).initial_state()
    checkpoints = Checkpoints(str(model_dir))
    for step in (3, 4):
        checkpoints.save(step, dataclasses.replace(state, step=jnp.int32(step)), run)
    checkpoints.close()

    flags = [f"--model_dir={model_dir}", f"--output={tmp_path}/out"]
    assert export_t5x.main([*flags, "--step=3"]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/out/checkpoint_3: 52 parameters of t5_1_1_tiny" in output
    assert "step_offset = 3" in output
    assert export_t5x.main(flags) == 0
    written = read.load(f"{tmp_path}/out")
    assert written.step == 4
    name = "encoder/layers_0/mlp/wo/kernel"
    expected = state.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(written.parameters[name].whole(), expected)
    assert not written.moments[name]["v"].whole().any()
    with pytest.raises(UserError, match="has no checkpoint of step 5; it has"):
        export_t5x.main([*flags, "--step=5"])


@pytest.mark.parametrize(
    ("preset", "scanned", "message"),
    [("bert_tiny", False, "no models of family bert"), ("lm_tiny", True, "scans no decoder-only")],
)
def test_unsupported_models_are_rejected(preset, scanned, message, tmp_path):
    config = config_of(preset=preset)
    with pytest.raises(UserError, match=message):
        write.write(read.Checkpoint("", 1, {}, run={}), config, str(tmp_path), scanned)


def test_every_unsupported_setting_is_named():
    assert engine.unsupported(config_of()) == []
    assert engine.unsupported(config_of(preset="lm_tiny")) == []
    flags = {
        "--on_nan=skip": "T5X makes every update",
        "--model.scan_layers=True": "table of relative positions in every layer",
        "--model.remat=dots": "table of relative positions in every layer",
        "--microbatches=2": "normalizes every microbatch",
        "--loss.normalizer=num_real_target_tokens": "normalizes every microbatch",
        "--model.mlp_activations=gelu_erf,linear": "T5X has no gelu_erf",
        "--model.position=absolute": "T5X has no such setting",
        "--model.max_positions=600": "T5X has no such setting",
        "--optimizer.schedule=constant*linear_cooldown": "no factor linear_cooldown",
        "--optimizer.cooldown_steps=10": "T5X has no such setting",
        "--mesh.fsdp=2": "T5X has no such setting",
        "--checkpoint.every_steps=30": "needs one to be a multiple of the other",
        "--evaluation.every_steps=20": "needs one to be a multiple of the other",
    }
    problems = engine.unsupported(config_of(*flags))
    for flag, message in flags.items():
        name = flag.partition("=")[0]
        assert any(name in problem and message in problem for problem in problems), flag
    assert len(problems) == len(flags) - 2
    named = engine.unsupported(
        config_of("--optimizer.name=adamw", "--optimizer.learning_rate=1", preset="bert_tiny")
    )
    assert [problem[:30] for problem in named] == [
        "T5X has no models of family bert, only"[:30],
        "--optimizer.name=adamw: this engine"[:30],
    ]


def test_settings_without_effect_are_rejected():
    with pytest.raises(UserError, match="--engine=jax: it must be one of 'palimpsest', 't5x'"):
        config_of("--engine=jax")
    with pytest.raises(UserError, match="init_from_state has no effect without --init_from"):
        config_of("--init_from_state=false")


@pytest.mark.skipif(T5X, reason="T5X is importable")
def test_missing_t5x_is_an_error_that_says_where_to_get_it():
    converter = types.SimpleNamespace(special=T5_IDS)
    run = types.SimpleNamespace(config=config_of(), converter=converter)
    with pytest.raises(UserError) as error:
        engine.train(run, {}, start)
    for word in ("no package registry", "google-research/t5x", engine.TESTED_COMMIT, "airio"):
        assert word in str(error.value)


@pytest.mark.skipif(not T5X, reason="T5X is not importable: docs/t5x_checkpoints.md says how")
def test_both_engines_make_the_same_updates(text_cache, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorflow import make_ndarray

    def pretrain(model_dir, steps, *flags):
        command = [sys.executable, "-m", "trainer.pretrain", "--preset=t5_1_1_tiny"]
        command += ["--task=python_docs_span_corruption", f"--cache_dir={text_cache}"]
        command += ["--lengths.inputs=64", "--lengths.targets=18", "--batch_size=8"]
        command += ["--metrics.every_steps=1", "--evaluation.every_steps=20"]
        command += ["--checkpoint.every_steps=10", f"--train_steps={steps}"]
        command += [f"--model_dir={model_dir}", *flags]
        made = completed(command)
        assert made.returncode == 0, made.stderr[-2000:]

    def scalars(folder, tag):
        (folder,) = glob.glob(str(tmp_path / "t5x" / folder))
        events = EventAccumulator(folder, size_guidance={"tensors": 0})
        events.Reload()
        return {each.step: float(make_ndarray(each.tensor_proto)) for each in events.Tensors(tag)}

    pretrain(tmp_path / "ours", 20)
    pretrain(tmp_path / "t5x", 10, "--engine=t5x")
    # Stopped half-way, T5X resumes with the next batch.
    pretrain(tmp_path / "t5x", 20, "--engine=t5x")
    lines = [
        json.loads(line) for line in (tmp_path / "ours/metrics.jsonl").read_text().splitlines()
    ]
    ours = {line["step"]: line["metrics"] for line in lines if line["split"] == "train"}
    assert list(ours) == list(range(1, 21))
    # T5X's loss includes the z-loss.
    loss = scalars("train", "loss_per_nonpadding_target_token")
    z_loss = scalars("train", "z_loss")
    tokens = {step: scalars("train", "loss")[step] / loss[step] for step in ours}
    for step, metrics in ours.items():
        assert abs(loss[step] - z_loss[step] / tokens[step] - metrics["loss"]) < 1e-4
        assert abs(scalars("train", "accuracy")[step] - metrics["accuracy"]) < 1e-6
    (validation,) = (line["metrics"] for line in lines if line["split"] == "validation")
    accuracy = scalars("training_eval/*", "accuracy")
    assert accuracy[20] == pytest.approx(validation["accuracy"], abs=1e-6)
    # Their states are the same too, in T5X's checkpoint and in ours.
    one, other = (values(read.load(f"{tmp_path}/{name}/checkpoint_20")) for name in ("t5x", "ours"))
    assert one.keys() == other.keys()
    for name, array in other.items():
        np.testing.assert_allclose(one[name], array, rtol=1e-3, atol=1e-5, err_msg=name)
