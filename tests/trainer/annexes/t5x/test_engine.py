"""Tests checkpoints written for T5X, and T5X as the engine of a run."""

import collections
import dataclasses
import glob
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict

from tasks.terminal.command_line import UserError
from tasks.vocabulary import T5_IDS
from tests.support import runs
from tests.support.processes import completed
from tests.support.runs import program_of, stub
from tests.support.trees import assert_close, assert_equal
from trainer.annexes.t5x import engine, export_t5x, write
from trainer.annexes.t5x import layout as t5x_layout
from trainer.checkpoints import layout, metadata, stored
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.checkpoints.tensors import held
from trainer.config import save_config
from trainer.engine.program import Program
from trainer.engine.step import make_gradients
from trainer.initialization import init_from
from trainer.initialization.resume import start
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params
from trainer.optim.optimizer import learning_rate_schedule, optimizer_of

pytestmark = pytest.mark.tensorflow

T5X = importlib.util.find_spec("t5x") is not None
STEP = 7


def config_of(*flags, **more):
    sizes = ("--model.vocab_size=128", "--train_steps=20", "--batch_size=2")
    return runs.config_of(*sizes, *flags, **more)


def random_state(config):
    """Returns a checkpoint of one of our runs with random values."""
    rng, abstract = np.random.default_rng(0), program_of(config).abstract_state()

    def value(leaf):
        return np.int32(STEP) if leaf.dtype == "int32" else rng.random(leaf.shape).astype("f4")

    params, state = (
        {path: held(value(leaf)) for path, leaf in named(tree).items()}
        for tree in (abstract.params, abstract.opt_state)
    )
    return stored.Checkpoint("", STEP, params, state=state, run={})


PER_LAYER = ("--model.position=relative_per_layer", "--model.scan_layers=true")


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
    theirs = stored.load(str(tmp_path))
    assert theirs.step == STEP
    assert theirs.run is None
    names = theirs.parameters
    assert ("decoder/decoder/mlp/wo/kernel" in names) == scanned
    if scanned:
        assert names["encoder/encoder/attention/out/kernel"].shape == (4, 2, 3, 8)
        assert names["encoder/encoder/relpos_bias/rel_embedding"].shape == (4, 2, 32)
    # Every parameter has all four moments; T5X stores unused ones as [1].
    moments = [name for name in metadata.array_names(path) if "/param_states/" in name]
    kinds = collections.Counter(name.rpartition("/")[2] for name in moments)
    assert kinds == dict.fromkeys(("m", "v", "v_col", "v_row"), len(names))
    assert_equal(values(theirs), values(ours))
    with pytest.raises(UserError, match="exists: delete it"):
        write.write(ours, config, str(tmp_path), scanned)


def test_moments_are_averaged_where_only_t5x_factors_them(tmp_path):
    """`scalable_t5` factors kernels of any size, we only large ones; the averages are exact."""
    config = config_of()
    ours = random_state(config)
    write.write(ours, config, str(tmp_path), scanned=True)
    parts = stored.load(str(tmp_path)).parts
    for layer in range(2):
        moments = parts[f"encoder/layers_{layer}/mlp/wi_0/kernel"]
        full = ours.state[f"0/v/encoder/layers_{layer}/mlp/wi_0/kernel"].whole()
        np.testing.assert_array_equal(moments["over 1"].whole(), full.mean(1))
        np.testing.assert_array_equal(moments["over 0"].whole(), full.mean(0))


def test_export_t5x_reports_what_it_wrote(tmp_path, capsys):
    model_dir = tmp_path / "model"
    config = config_of(
        f"--model_dir={model_dir}", "--optimizer.name=adamw", "--optimizer.learning_rate=0.001"
    )
    model_dir.mkdir()
    save_config(config, {})
    run = stub(config)
    state = program_of(config).initial_state()
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
    written = stored.load(f"{tmp_path}/out")
    assert written.step == 4
    name = "encoder/layers_0/mlp/wo/kernel"
    expected = state.params["encoder"]["layers_0"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(written.parameters[name].whole(), expected)
    assert not written.parts[name]["v"].whole().any()
    with pytest.raises(UserError, match="has no checkpoint of step 5; it has"):
        export_t5x.main([*flags, "--step=5"])


@pytest.mark.parametrize(
    ("preset", "scanned", "message"),
    [("bert_tiny", False, "no bert models"), ("lm_tiny", True, "not scan decoder-only")],
)
def test_unsupported_models_are_rejected(preset, scanned, message, tmp_path):
    config = config_of(preset=preset)
    with pytest.raises(UserError, match=message):
        write.write(stored.Checkpoint("", 1, {}, run={}), config, str(tmp_path), scanned)


def test_every_unsupported_setting_is_named():
    assert engine.unsupported(config_of()) == []
    assert engine.unsupported(config_of(preset="lm_tiny")) == []
    flags = {
        "--on_nan=skip": "T5X makes every update",
        "--model.scan_layers=True": "table of relative positions in every layer",
        "--model.remat=dots": "table of relative positions in every layer",
        "--microbatches=2": "normalizes each microbatch",
        "--loss.normalizer=num_real_target_tokens": "normalizes each microbatch",
        "--model.mlp_activations=gelu_erf,linear": "T5X has no gelu_erf",
        "--model.position=absolute": "T5X has no such setting",
        "--model.max_positions=600": "T5X has no such setting",
        "--optimizer.schedule=constant*linear_cooldown": "no factor linear_cooldown",
        "--optimizer.cooldown_steps=10": "T5X has no such setting",
        "--checkpoint.keep_every_steps=100": "T5X reads this setting from gin files only",
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
        "T5X has no bert models, only t5_1_0"[:30],
        "--optimizer.name=adamw: this engine"[:30],
    ]


def test_what_a_run_implies_is_not_unsupported(text_cache):
    run = runs.run_of(text_cache, "--engine=t5x", "--lengths.inputs=64")
    assert run.config.evaluation.decoding.max_new_tokens == run.config.lengths.targets
    assert engine.unsupported(run.config) == []
    config = config_of("--evaluation.decoding.max_new_tokens=7")
    assert "max_new_tokens=7: T5X has no such" in " ".join(engine.unsupported(config))


@pytest.mark.parametrize(
    ("flags", "supported"),
    [
        (("--model.softmax_dtype=float32", "--model.dtype=bfloat16"), True),
        (("--model.softmax_dtype=float32", "--model.dtype=float32", *PER_LAYER), True),
        (("--model.softmax_dtype=float32", "--model.dtype=bfloat16", *PER_LAYER), False),
        (("--model.softmax_dtype=bfloat16", "--model.dtype=float32"), False),
    ],
)
def test_a_softmax_that_t5x_computes_in_another_type_is_refused(flags, supported):
    problems = engine.unsupported(config_of(*flags))
    assert ["--model.softmax_dtype=" in each for each in problems] == [True] * (not supported)


def test_settings_without_effect_are_rejected():
    with pytest.raises(UserError, match="--engine=jax: it must be one of 'palimpsest', 't5x'"):
        config_of("--engine=jax")


@pytest.mark.skipif(T5X, reason="T5X is importable")
def test_missing_t5x_is_an_error_that_says_where_to_get_it():
    converter = types.SimpleNamespace(special=T5_IDS)
    run = types.SimpleNamespace(config=config_of(), converter=converter)
    with pytest.raises(UserError) as error:
        engine.train(run, {}, start)
    for word in ("not on a package registry", "google-research/t5x", engine.TESTED_COMMIT, "airio"):
        assert word in str(error.value)


@pytest.mark.skipif(not T5X, reason="T5X is not importable: docs/t5x_checkpoints.md says how")
def test_both_engines_make_the_same_updates(text_cache, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorflow import make_ndarray

    def pretrain(model_dir, steps, *flags):
        given = ("--batch_size=8", "--evaluation.every_steps=20", "--checkpoint.every_steps=10")
        given += (f"--train_steps={steps}", *flags)
        made = completed(runs.pretrain(text_cache, model_dir, *given))
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
    lines = runs.curve(tmp_path / "ours")
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
    one, other = (
        values(stored.load(f"{tmp_path}/{name}/checkpoint_20")) for name in ("t5x", "ours")
    )
    assert_close(one, other, rtol=1e-3, atol=1e-5)


B, L, V, UPDATES = 8, 12, 128, 50
CASES = [
    ("num_real_target_tokens", 2, "", ""),
    ("num_total_target_tokens", 4, "", "--optimizer.clip_norm=0.5"),
    ("average_per_sequence", 2, "", ""),
    ("average_per_sequence", 4, "relative_per_layer", "--optimizer.beta1=0.9"),
]


def batch_of(update):
    """Returns ragged rows with one or two packed examples on each side."""
    rng = np.random.default_rng(update)
    batch = {}
    for side in ("encoder", "decoder"):
        lengths = rng.integers(3, L + 1, (B, 1))
        there = np.arange(L) < lengths
        tokens = rng.integers(3, V, (B, L)) * there
        second = np.arange(L) >= lengths // 2
        segments = there * (1 + second)
        batch[f"{side}_input_tokens"] = tokens
        batch[f"{side}_segment_ids"] = segments
        batch[f"{side}_positions"] = (np.arange(L) - second * (lengths // 2)) * there
        if side == "decoder":
            batch["decoder_target_tokens"] = tokens
            batch["decoder_input_tokens"] = np.roll(tokens, 1, 1) * (np.arange(L) > 0)
            batch["decoder_loss_weights"] = there
    return {name: jnp.asarray(array, jnp.int32) for name, array in batch.items()}


def run_of(normalizer, microbatches, position, flag):
    flags = [
        *(f"--model.vocab_size={V}", f"--batch_size={B}", f"--microbatches={microbatches}"),
        *(f"--loss.normalizer={normalizer}", "--loss.normalize_over=microbatch"),
        *("--loss.label_smoothing=0.1", "--train_steps=200", "--optimizer.schedule=constant"),
        *("--optimizer.learning_rate=0.01", "--optimizer.min_dim_size_to_factor=8"),
        *([f"--model.position={position}", "--model.scan_layers=true"] if position else []),
    ]
    config = runs.config_of(*flags, *filter(None, [flag]))
    assert engine.unsupported(config) == []
    return stub(config, vocab_size=V)


def in_their_shape(array, shape):
    """Splits heads off; those of a stacked kernel of outputs stand before the layers."""
    if len(shape) == 4 and shape[1] == array.shape[1] and shape[0] != array.shape[0]:
        heads, layers, channels, width = shape
        return array.reshape(heads, channels, layers, width).swapaxes(1, 2)
    return array.reshape(shape)


def t5x_state(config):
    """Returns (T5X's model, its state with our initial parameters, T5X's update)."""
    from t5x import train_state, trainer

    model = engine._model(config, V, prefix=False)
    shapes = {name: array.shape for name, array in batch_of(0).items()}
    variables = model.get_initial_variables(jax.random.key(0), shapes)
    spec = model_spec(config.model)
    ours = named(init_params(spec, jax.random.key(1)))
    theirs = named(dict(variables["params"]))
    assert ours.keys() == theirs.keys()
    params = {name: in_their_shape(ours[name], array.shape) for name, array in theirs.items()}
    variables = {**variables, "params": unflatten_dict(params, sep="/")}
    state = train_state.FlaxOptimTrainState.create(model.optimizer_def, variables)
    rate = learning_rate_schedule(config.optimizer)

    @jax.jit
    def update(state, batch):
        key = jax.random.PRNGKey(0)
        gradients, _, _ = trainer.accumulate_grads_microbatched(
            model, state, batch, key, config.microbatches
        )
        return state.apply_gradient(gradients, learning_rate=rate(state.step))

    return state, update


def as_checkpoint(state):
    """Returns T5X's state as our reader finds it in a checkpoint."""
    from flax import serialization

    kept = named(serialization.to_state_dict(state.state_dict())["state"]["param_states"])
    moments = {}
    for name, array in kept.items():
        parameter, _, kind = name.rpartition("/")
        moments.setdefault(parameter, {})[kind] = held(array)
    parameters = {name: held(array) for name, array in named(state.params).items()}
    parts = t5x_layout.unstacked(parameters, moments)
    return stored.Checkpoint("a run of T5X", int(state.step), parameters, parts=parts)


@pytest.mark.filterwarnings("ignore:jax.experimental.pjit:DeprecationWarning")
@pytest.mark.skipif(not T5X, reason="T5X is not importable: docs/t5x_checkpoints.md")
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_fifty_updates_are_those_of_t5x(case, resumed, monkeypatch):
    run = run_of(*case)
    config = run.config
    theirs, their_update = t5x_state(config)
    spec = model_spec(config.model)
    gradients_of = make_gradients(build_model(spec), config)
    optimizer = optimizer_of(config.optimizer, spec)

    @jax.jit
    def our_update(params, state, batch):
        gradients, _ = gradients_of(params, batch, jax.random.key(0))
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    first = 10 if resumed else 0
    for update in range(first):
        theirs = their_update(theirs, batch_of(update))
    params = init_params(spec, jax.random.key(1))
    state = optimizer.init(params)
    if resumed:
        monkeypatch.setattr(init_from, "load", lambda path: as_checkpoint(theirs))
        run.config = dataclasses.replace(config, init_from="t5x")
        start = init_from.start(run)
        assert start.reset is None
        begun = start.state(Program(run))
        params, state = begun.params, begun.opt_state
    for update in range(first, first + UPDATES):
        batch = batch_of(update)
        theirs = their_update(theirs, batch)
        params, state = our_update(params, state, batch)
    expected, found = named(theirs.params), named(params)
    for name, array in expected.items():
        ours = in_their_shape(found[name], array.shape)
        error = np.abs(ours - array).max() / np.abs(array).max()
        assert error < 1e-5, (name, error)
