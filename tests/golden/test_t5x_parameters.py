"""Parameters, their initial values, single functions and steps are T5X's."""

import ast
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.config import OptimizerConfig
from trainer.model.apart import Apart
from trainer.model.positions import T5RelativePosition
from trainer.model.spec import model_spec
from trainer.model.transformer import init_params, logical_axes
from trainer.optim.optimizer import learning_rate_schedule, make_optimizer


def paths(tree) -> dict[str, object]:
    """Leaves by "decoder/layers_0/mlp/wo/kernel"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(entry.key for entry in path): leaf for path, leaf in leaves}


def test_the_reference_folder_holds_arrays(reference):
    assert (reference.folder / "model_meta.json").is_file()
    assert any(reference.folder.glob("*.npz"))


def test_paths_and_shapes(array_set):
    spec = model_spec(array_set.config)
    ours = jax.eval_shape(lambda key: init_params(spec, key), jax.random.PRNGKey(0))
    expected = {name: array.shape for name, array in paths(array_set.params).items()}
    assert {name: leaf.shape for name, leaf in paths(ours).items()} == expected
    assert all(leaf.dtype == "float32" for leaf in paths(ours).values())


def test_logical_axes(array_set):
    if array_set.name not in array_set.meta.get("axes", {}):
        pytest.skip(f"model_meta.json tells no axes of {array_set.name}")
    told = array_set.meta["axes"][array_set.name]
    expected = {name.removesuffix("_axes"): ast.literal_eval(axes) for name, axes in told.items()}
    ours = logical_axes(model_spec(array_set.config))
    assert {name: tuple(axes) for name, axes in paths(ours).items()} == expected


OWN_ARRAYS = Path(__file__).parent / "reference"
# The models were made one after the other, each with the next seed.
SEED_OFFSETS = {"encdec_untied": 0, "encdec_tied": 1, "lm_tied": 2, "lm_untied": 3}


def test_initial_parameters(array_set, reference):
    if reference.folder != OWN_ARRAYS:
        pytest.skip("the keys of another reference are not known")
    key = jax.random.PRNGKey(array_set.meta["config"]["seed"] + SEED_OFFSETS[array_set.name])
    ours = Apart(partial(init_params, model_spec(array_set.config), key))()
    compared = 0
    for path, expected in jax.tree_util.tree_leaves_with_path(array_set.params):
        names = [entry.key for entry in path]
        if names[-1] == "scale":  # replaced in the reference, so that they matter
            continue
        actual = ours
        for name in names:
            actual = actual[name]
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7, err_msg=str(names))
        compared += 1
    assert compared > 0


@pytest.mark.parametrize("direction", ["bidirectional", "causal"])
def test_relative_position_buckets(units, direction):
    distance = units["relpos/distance (memory - query)"]
    name = next(name for name in units if name.startswith(f"relpos/bucket_{direction}_"))
    num_buckets, max_distance = map(int, name.split("_")[-2:])
    position = T5RelativePosition(direction == "bidirectional", num_buckets, max_distance)
    np.testing.assert_array_equal(position.bucket(distance), units[name])


def test_learning_rate_schedules(units):
    steps = units["lr/steps"]
    names = [name for name in units if name.startswith("lr/") and name != "lr/steps"]
    assert names
    for name in names:
        factors, base, warmup = re.fullmatch(r"lr/(.*)\|base=(.*)\|warmup=(.*)", name).groups()
        config = OptimizerConfig(
            learning_rate=float(base), schedule=factors, warmup_steps=int(warmup)
        )
        ours = learning_rate_schedule(config)(steps)
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, units[name], rtol=1e-6, err_msg=name)


def test_adafactor_steps(units, assert_close):
    start = "adafactor/p0_int8/"
    tensors = [name.removeprefix(start) for name in units if name.startswith(start)]
    params = {
        name: jnp.asarray(units[f"adafactor/p0_int8/{name}"] * units[f"adafactor/p0_scale/{name}"])
        for name in tensors
    }
    rates = units["adafactor/learning_rate"]
    # Injected, since the rates of this unit follow no schedule.
    optimizer = optax.inject_hyperparams(lambda rate: scaled_adafactor(rate))(rate=1.0)
    state = optimizer.init(params)
    compared = 0
    for index, rate in enumerate(rates):
        state.hyperparams["rate"] = jnp.float32(rate)
        gradients = {
            name: jnp.asarray(
                units[f"adafactor/grad{index}_int8/{name}"] * units["adafactor/grad_scale"]
            )
            for name in tensors
        }
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for name in tensors:
            key = f"adafactor/params_after_{index + 1}/{name}"
            if key in units:
                assert_close(params[name], units[key], 1e-6, key)
                compared += 1
    assert compared >= len(tensors)

    moments = next(part for part in state.inner_state[0] if hasattr(part, "v_row"))
    for name in tensors:
        factored = f"adafactor/v_row_after_{len(rates)}/{name}" in units
        assert (moments.v_row[name].shape != (1,)) == factored, name
        for moment in ("v_row", "v_col", "v"):
            key = f"adafactor/{moment}_after_{len(rates)}/{name}"
            if key in units:
                assert_close(getattr(moments, moment)[name], units[key], 1e-6, key)


def scaled_adafactor(rate) -> optax.GradientTransformation:
    """Ours at learning rate 1, times `rate`: Adafactor's update is linear in its rate."""
    ours = make_optimizer(OptimizerConfig(learning_rate=1.0, schedule="constant"))
    return optax.chain(ours, optax.scale(rate))
