"""Updates with microbatches against T5X's own, where T5X is importable."""

import dataclasses
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.config.from_flags import build_config
from trainer.engine.program import Program
from trainer.engine.step import make_gradients
from trainer.model.spec import model_spec
from trainer.model.transformer import (
    build_model,
    init_params,
)
from trainer.optim.optimizer import learning_rate_schedule, optimizer_of
from trainer.starting import init_from
from trainer.t5x import engine, read
from trainer.t5x.tensors import held

T5X = importlib.util.find_spec("t5x") is not None
pytestmark = pytest.mark.skipif(not T5X, reason="T5X is not importable: docs/t5x_checkpoints.md")
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
    config, _ = build_config("t5_1_1_tiny", [*flags, *filter(None, [flag])])
    assert engine.unsupported(config) == []
    return types.SimpleNamespace(
        config=config,
        data=types.SimpleNamespace(
            vocab_size=V, fingerprints={}, record={}, vocabulary_sha256=None
        ),
    )


def in_their_shape(array, shape):
    """Splits heads off; those of a stacked kernel of outputs stand before the layers."""
    if len(shape) == 4 and shape[1] == array.shape[1] and shape[0] != array.shape[0]:
        heads, layers, channels, width = shape
        return array.reshape(heads, channels, layers, width).swapaxes(1, 2)
    return array.reshape(shape)


def t5x_state(config):
    """Returns (T5X's model, its state with our initial parameters, T5X's update)."""
    from flax import traverse_util
    from t5x import train_state, trainer

    model = engine._model(config, V, prefix=False)
    shapes = {name: array.shape for name, array in batch_of(0).items()}
    variables = model.get_initial_variables(jax.random.key(0), shapes)
    spec = model_spec(config.model)
    ours = traverse_util.flatten_dict(init_params(spec, jax.random.key(1)), sep="/")
    theirs = traverse_util.flatten_dict(dict(variables["params"]), sep="/")
    assert ours.keys() == theirs.keys()
    params = {name: in_their_shape(ours[name], array.shape) for name, array in theirs.items()}
    variables = {**variables, "params": traverse_util.unflatten_dict(params, sep="/")}
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


def flat(tree):
    from flax import traverse_util

    return {
        name: np.asarray(array)
        for name, array in traverse_util.flatten_dict(dict(tree), sep="/").items()
    }


def as_checkpoint(state):
    """Returns T5X's state as our reader finds it in a checkpoint."""
    from flax import serialization

    kept = flat(serialization.to_state_dict(state.state_dict())["state"]["param_states"])
    moments = {}
    for name, array in kept.items():
        parameter, _, kind = name.rpartition("/")
        moments.setdefault(parameter, {})[kind] = held(array)
    parameters = {name: held(array) for name, array in flat(state.params).items()}
    return read.Checkpoint("a run of T5X", int(state.step), parameters, moments)


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
    expected, found = flat(theirs.params), flat(params)
    for name, array in expected.items():
        ours = in_their_shape(found[name], array.shape)
        error = np.abs(ours - array).max() / np.abs(array).max()
        assert error < 1e-5, (name, error)
