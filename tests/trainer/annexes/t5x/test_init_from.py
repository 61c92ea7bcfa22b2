"""Runs that start from checkpoints: T5X's in all layouts, ours, and checkpoints that do not fit."""

import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from flax import serialization

from tasks.terminal.command_line import UserError
from tests.support import t5x_files
from tests.support.runs import config_of, curve, trained
from tests.support.trees import assert_equal
from tests.trainer.initialization.test_init_from import run_of
from trainer.checkpoints import layout, stored
from trainer.engine.program import Program
from trainer.initialization import init_from
from trainer.model.layers import unstack_layers
from trainer.model.paths import named
from trainer.optim.optimizer import learning_rate_schedule

pytestmark = pytest.mark.processes

STEP, D, V = t5x_files.STEP, t5x_files.D, t5x_files.V

PARAMETERS = t5x_files.parameters()
SCANNED = t5x_files.scanned(PARAMETERS)
# T5X factors unstacked tensors by their size.
UNSTACKED = {
    name: value
    for name, value in t5x_files.moments(PARAMETERS, 8).items()
    if name.startswith(("token_embedder", "decoder/logits_dense"))
}
PER_LAYER = "--model.position=relative_per_layer"
# As `scalable_t5` has them after training: a table of relative positions for each layer.
TABLES_APART = {
    name: np.random.default_rng(3).normal(size=array.shape).astype("f4")
    if "relpos_bias" in name
    else array
    for name, array in SCANNED.items()
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("kind", t5x_files.LAYOUTS)
def test_every_tensor_of_every_layout_is_read(kind, scanned, dtype, tmp_path):
    t5x_files.write(tmp_path, kind, SCANNED if scanned else PARAMETERS, dtype=dtype)
    checkpoint = stored.load(str(tmp_path))
    assert checkpoint.step == STEP
    assert {str(tensor.dtype) for tensor in checkpoint.parameters.values()} == {dtype}
    found = layout.with_shared_positions("it", layout.read_parts(checkpoint))
    written = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    expected = {name: array.astype(written) for name, array in PARAMETERS.items()}
    assert_equal({name: parts["value"].whole() for name, parts in found.items()}, expected)


def test_bfloat16_stored_as_uint16_is_read(tmp_path):
    path = t5x_files.write(tmp_path, "legacy", PARAMETERS)
    tree = path / "checkpoint"
    # Format version 2 stored bfloat16 as uint16; here the norm is stored inline.
    contents = serialization.msgpack_restore(tree.read_bytes())
    scale = PARAMETERS["decoder/decoder_norm/scale"].astype(ml_dtypes.bfloat16)
    contents["version"] = 2
    contents["optimizer"]["target"]["decoder"]["decoder_norm"]["scale"] = scale.view(np.uint16)
    tree.write_bytes(serialization.msgpack_serialize(contents))
    parameters = stored.load(str(path)).parameters
    np.testing.assert_array_equal(parameters["decoder/decoder_norm/scale"].whole(), scale)
    contents["version"] = 1
    tree.write_bytes(serialization.msgpack_serialize(contents))
    with pytest.raises(UserError, match="version 1"):
        stored.load(str(path))


@pytest.mark.parametrize("stored", ["unscanned", "scanned"])
@pytest.mark.parametrize("model", ["unscanned", "scanned"])
def test_parameters_and_state_reach_the_devices(stored, model, tmp_path):
    flags = ["--optimizer.min_dim_size_to_factor=8", f"--model.scan_layers={model == 'scanned'}"]
    if stored == "scanned":
        moments = t5x_files.scanned_moments(SCANNED) | UNSTACKED
        t5x_files.write(tmp_path, "orbax", SCANNED, moments)
    else:
        moments = t5x_files.moments(PARAMETERS, 8)
        t5x_files.write(tmp_path, "legacy", PARAMETERS, moments)
    run = run_of(tmp_path, *flags)
    start = init_from.start(run)
    assert start.reset is None
    assert "with the optimizer state" in start.describe()
    state = start.state(Program(run))
    params = unstack_layers(state.params) if model == "scanned" else state.params
    assert_equal(named(params), PARAMETERS)
    assert int(state.step) == STEP
    factored, schedule = state.opt_state[0], state.opt_state[2]
    assert (int(factored.count), int(schedule.count)) == (STEP, STEP)
    # Compares the denominators of the update layer by layer, whichever factor is called the row.
    for name in PARAMETERS:
        of_model = {kind: named(getattr(factored, kind)) for kind in ("v", "v_row", "v_col")}
        ours = _second_moments(name, of_model, model == "scanned")
        theirs = _second_moments_of_t5x(name, moments, stored == "scanned")
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("scanned", [False, True])
def test_a_table_of_positions_per_layer_goes_on_with_its_state(scanned, tmp_path):
    moments = t5x_files.scanned_moments(TABLES_APART, own_tables=True) | UNSTACKED
    t5x_files.write(tmp_path, "orbax", TABLES_APART, moments)
    flags = [PER_LAYER, "--optimizer.min_dim_size_to_factor=8", f"--model.scan_layers={scanned}"]
    run = run_of(tmp_path, *flags)
    start = init_from.start(run)
    assert start.reset is None
    state = start.state(Program(run))
    params, v = named(state.params), named(state.opt_state[0].v)
    for stack in ("encoder", "decoder"):
        joined = f"{stack}/{stack}/relpos_bias/rel_embedding"
        for tree, written in ((params, TABLES_APART[joined]), (v, moments[f"{joined}/v"])):
            names = [f"{stack}/layers_{layer}/relpos_bias/rel_embedding" for layer in range(2)]
            found = tree[joined] if scanned else np.stack([tree[name] for name in names], 1)
            np.testing.assert_array_equal(found, written)


def _second_moments(name, kinds, scanned):
    """Returns the second moments of one layer: v, or the product of its factors."""
    layer = re.fullmatch(r"(\w+)/layers_(\d+)/(.+)", name)
    stack = scanned and layer
    key = f"{layer[1]}/{layer[1]}/{layer[3]}" if stack else name
    shape = PARAMETERS[name].shape
    full = kinds["v"][key]
    if full.shape != (1,):
        return full.take(int(layer[2]), 1) if stack else full
    second, largest = np.argsort(shape, kind="stable")
    row, column = (
        kinds[kind][key].take(int(layer[2]), 0 if gone == 0 else 1) if stack else kinds[kind][key]
        for kind, gone in (("v_row", largest), ("v_col", second))
    )
    return np.expand_dims(row / row.mean(), largest) * np.expand_dims(column, second)


def _second_moments_of_t5x(name, moments, scanned):
    """Returns the second moments of one layer from moments as T5X stores them."""
    layer = re.fullmatch(r"(\w+)/layers_(\d+)/(.+)", name)
    table = name.endswith("rel_embedding")
    if not scanned or not (layer or table):
        kinds = {kind: {name: moments[f"{name}/{kind}"]} for kind in ("v", "v_row", "v_col")}
        return _second_moments(name, kinds, scanned=False)
    stack, number, rest = (
        (layer[1], int(layer[2]), layer[3])
        if layer
        else (name.split("/")[0], 0, name.split("/", 1)[1])
    )
    full, row, column = (
        moments[f"{stack}/{stack}/{rest}/{kind}"] for kind in ("v", "v_row", "v_col")
    )
    if full.shape != (1,):
        return full.take(number, 1)
    if rest.split("/")[-2] in ("out", "wo"):  # [rest of it, embed]
        row, column = row[number], column.take(number, 1).reshape(-1)
        return column[:, None] * row / row.mean()
    row, column = row[:, number], column[number].reshape(-1)
    return row[:, None] / row.mean() * column


def test_moments_of_another_shape_are_reset_and_the_step_is_kept(tmp_path):
    t5x_files.write(tmp_path, "orbax", SCANNED, t5x_files.scanned_moments(SCANNED))
    run = run_of(tmp_path, "--optimizer.step_offset=7")
    start = init_from.start(run)
    assert start.step == STEP
    assert re.search(
        r"no second moments of \S+/query/kernel|a new optimizer state", start.describe()
    )
    state = start.state(Program(run))
    assert_equal(named(state.params), PARAMETERS)
    assert (int(state.opt_state[0].count), int(state.opt_state[2].count)) == (7, STEP)
    assert not any(array.any() for array in named(state.opt_state[0].v).values())


def test_a_reset_names_its_reason(tmp_path):
    t5x_files.write(tmp_path, "orbax", PARAMETERS, t5x_files.moments(PARAMETERS, 128))
    start = init_from.start(run_of(tmp_path, "--optimizer.beta1=0.9"))
    assert start.step == STEP
    for words in ("it has no momentum of ", "make sure it is this run's"):
        assert words in start.describe()


@pytest.mark.parametrize("step", [None, -5])
@pytest.mark.parametrize("kind", ["orbax", "legacy"])
def test_a_state_without_a_step_starts_at_0_only_if_asked_to(kind, step, tmp_path):
    path = t5x_files.write(tmp_path, kind, PARAMETERS, step=step)
    with pytest.raises(UserError, match=r"state/step is .*init_from_state=false"):
        init_from.start(run_of(path))
    start = init_from.start(run_of(path, "--init_from_state=false"))
    assert start.step == 0


@pytest.mark.parametrize("value", [np.nan, -np.inf, 5.3e34])
def test_parameters_that_are_not_finite_or_absurd_are_named(value, tmp_path):
    name = "encoder/layers_1/mlp/wo/kernel"
    damaged = PARAMETERS[name].copy()
    damaged[3, 2] = value
    path = t5x_files.write(tmp_path, "legacy", {**PARAMETERS, name: damaged})
    run = run_of(path)
    start = init_from.start(run)
    with pytest.raises(UserError, match=f"{name} holds (NaN or infinity|an element of 5.3e.34)"):
        start.state(Program(run))


@pytest.mark.parametrize("kind", t5x_files.LAYOUTS)
def test_missing_and_unexpected_tensors_are_named(kind, tmp_path):
    name, other = "encoder/layers_1/mlp/wi_0/kernel", "encoder/layers_1/mlp/wi_zero/kernel"
    incomplete = {key: array for key, array in PARAMETERS.items() if key != name}
    cases = {
        "missing": (incomplete, f"lacks {name}, which the model has"),
        "renamed": ({**incomplete, other: PARAMETERS[name]},
            f"lacks {name} (did you mean {other}?), which"),
        "more": ({**PARAMETERS, other: PARAMETERS[name]},
            f"has {other} (did you mean encoder/layers_1/mlp/wi_1/kernel?), which the model does "
            "not have"),
    }  # fmt: skip
    for case, (parameters, says) in cases.items():
        path = t5x_files.write(tmp_path / case, kind, parameters)
        with pytest.raises(UserError, match=re.escape(f"{path} {says}")):
            init_from.start(run_of(path))
    joined = "decoder/decoder/mlp/wo/kernel"
    parameters = {key: array for key, array in SCANNED.items() if key != joined}
    path = t5x_files.write(tmp_path / "scanned", kind, parameters)
    with pytest.raises(UserError, match=f"lacks {joined}, which"):
        init_from.start(run_of(path))


def test_mismatches_are_named(tmp_path):

    small = {**PARAMETERS, "token_embedder/embedding": np.zeros((V - 28, D), "f4")}
    other = t5x_files.write(tmp_path / "small", "orbax", small)
    with pytest.raises(UserError, match="a different vocabulary: this run's has 108 ids"):
        init_from.start(run_of(other))
    whole = {**PARAMETERS, "decoder/decoder_norm/scale": np.ones(D, "i4")}
    other = t5x_files.write(tmp_path / "whole", "legacy", whole, dtype="int32")
    with pytest.raises(UserError, match=r"has dtype int32, expected floating point"):
        init_from.start(run_of(other))
    other = t5x_files.write(tmp_path / "apart", "orbax", TABLES_APART)
    with pytest.raises(
        UserError, match=r"layers 0 and 1 of the \w+coder .*/relpos_bias.*=relative_per_layer"
    ):
        init_from.start(run_of(other))
    with pytest.raises(UserError, match="neither is nor holds a checkpoint"):
        init_from.start(run_of(tmp_path / "small" / "checkpoint_10" / "state" / "d"))


def test_missing_and_damaged_files_are_named(tmp_path):
    path = t5x_files.write(tmp_path, "legacy", PARAMETERS)
    chunk = path / "target.encoder.encoder_norm.scale" / "0"
    held_bytes = chunk.read_bytes()
    for damaged in (None, held_bytes[:20]):
        chunk.unlink()
        if damaged is not None:
            chunk.write_bytes(damaged)
        start = init_from.start(run_of(path))
        with pytest.raises(UserError, match=r"target/encoder/encoder_norm/scale in .* be read"):
            start.parameters["encoder/encoder_norm/scale"].whole()
        chunk.write_bytes(held_bytes)
    shutil.rmtree(chunk.parent)
    with pytest.raises(UserError, match=r"cannot be read: target/encoder/encoder_norm/scale"):
        init_from.start(run_of(path))
    (path / "checkpoint").write_bytes(b"nothing")
    with pytest.raises(UserError, match=f"{path} cannot be read"):
        init_from.start(run_of(path))


def test_the_newest_finished_checkpoint_is_used(tmp_path):
    for step in (9, 10, 100):
        t5x_files.write(tmp_path, "orbax", PARAMETERS, step=step)
    (tmp_path / "checkpoint_1000").mkdir()
    (tmp_path / "checkpoint_200.orbax-checkpoint-tmp-1").mkdir()
    assert stored.find(str(tmp_path)) == str(tmp_path / "checkpoint_100")
    assert stored.find(str(tmp_path / "checkpoint_9")) == str(tmp_path / "checkpoint_9")


def train(cache, model_dir, *flags):
    quiet = ("--batch_size=2", "--evaluation.every_steps=0", "--metrics.every_steps=1")
    trained(cache, model_dir, *quiet, "--metrics.tensorboard=false", *flags, lengths=(40, 12))
    return curve(model_dir)


@pytest.mark.processes
def test_a_run_starts_from_t5x_and_then_resumes_itself(text_cache, tmp_path, capsys):
    wide = {
        **PARAMETERS,
        "token_embedder/embedding": np.random.default_rng(2).normal(size=(768, D)).astype("f4"),
        "decoder/logits_dense/kernel": np.random.default_rng(3).normal(size=(D, 768)).astype("f4"),
    }
    start = tmp_path / "t5x"
    t5x_files.write(start, "legacy", wide, t5x_files.moments(wide, 128), step=20_000)
    begin = f"--init_from={start}"
    lines = train(text_cache, tmp_path / "one", begin, "--train_steps=20002")
    with pytest.raises(UserError, match=f"in {start} were not written by this trainer"):
        train(text_cache, start, "--train_steps=20002")
    assert f"starts from {start}/checkpoint_20000, after step 20000" in capsys.readouterr().out
    assert [line["step"] for line in lines] == [20_001, 20_002]
    rate = learning_rate_schedule(config_of().optimizer)(20_000)
    assert lines[0]["metrics"]["learning_rate"] == pytest.approx(float(rate), rel=1e-6)

    # Its own checkpoint takes precedence: --init_from is not opened.
    shutil.rmtree(start)
    lines = train(text_cache, tmp_path / "one", begin, "--train_steps=20003")
    assert "resumes from checkpoint 20002" in capsys.readouterr().out
    assert [line["step"] for line in lines] == [20_001, 20_002, 20_003]
