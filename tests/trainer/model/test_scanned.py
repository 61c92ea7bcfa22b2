"""A scan equals `jax.lax.scan` in results and gradients, and keeps only what it must."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from jax import lax

from tests.support.cases import entries
from tests.support.parameters import slow_unless
from tests.support.trees import assert_close, assert_equal
from tests.trainer.model.conftest import TinyModel
from trainer.model import layers, scanned, stack
from trainer.model.device import Device
from trainer.model.feedforward import SOWN
from trainer.model.scanned import scan
from trainer.model.transformer import run_model

pytestmark = pytest.mark.processes

LENGTH, WIDTH = 5, 4


def arrays(*names):
    key = jax.random.key(7)
    shapes = {
        "x": (3, WIDTH), "kernels": (LENGTH, WIDTH, WIDTH), "bias": (WIDTH,), "scale": (),
        "more": (LENGTH, 3, WIDTH),
    }  # fmt: skip
    drawn = {
        name: jax.random.normal(jax.random.fold_in(key, index), shape)
        for index, (name, shape) in enumerate(shapes.items())
    }
    return [drawn[name] for name in names]


def run(scan, x, kernels, bias, scale, more):
    """Scans layers with states and inputs of every kind, some of them closed over."""
    mask, steps = jnp.arange(3)[:, None] < 2, jnp.arange(LENGTH)
    keys = jax.random.split(jax.random.key(3), LENGTH)
    shared = jnp.tanh(bias)  # depends on no layer

    def layer(states, own):
        (x, count), (kernel, key, number, more) = states, own
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        y = jnp.where(mask, jnp.sin(x @ kernel + shared), x * scale)
        y = jnp.where(kept, y, 0).astype(x.dtype) + number.astype(x.dtype) * more
        return (y, count + jnp.sum(kept)), (jnp.mean(y, axis=0), count)

    start = x, jnp.zeros((), jnp.int32)
    (x, count), (means, counts) = scan(layer, start, (kernels, keys, steps, more), LENGTH)
    return jnp.sum(x**2) + jnp.sum(means[1:] ** 3), (count, counts, means)


INPUTS = "x", "kernels", "bias", "scale", "more"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", [None, "dots"])
def test_results_and_gradients_are_those_of_jax(dtype, policy):
    inputs = [each.astype(dtype) for each in arrays(*INPUTS)]

    def checkpointed(scan):
        if policy is None:
            return scan
        keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        remat = partial(jax.checkpoint, policy=keep, prevent_cse=False)
        return lambda layer, *others: scan(remat(layer), *others)

    def gradients(scan):
        of = jax.value_and_grad(partial(run, checkpointed(scan)), range(5), has_aux=True)
        return jax.jit(of)(*inputs)

    assert_equal(gradients(scan), gradients(lax.scan))
    assert_equal(jax.jit(partial(run, scan))(*inputs), jax.jit(partial(run, lax.scan))(*inputs))


@pytest.mark.parametrize("wanted", [0, 2])
def test_the_gradient_of_one_input_is_that_of_jax(wanted):
    def gradient(scan):
        of = jax.grad(partial(run, scan), wanted, has_aux=True)
        return jax.jit(of)(*arrays(*INPUTS))

    assert_equal(gradient(scan), gradient(lax.scan))


def test_only_what_differs_between_layers_is_kept_for_each():
    x, kernels, bias = arrays("x", "kernels", "bias")

    def last(x, kernels, bias):
        def layer(x, kernel):
            return jnp.sin(x @ kernel) * jnp.exp(bias), None

        return scan(layer, x, kernels, LENGTH)[0]

    _, backward = jax.vjp(last, x, kernels, bias)
    shapes = [leaf.shape for leaf in jax.tree.leaves(backward)]
    # The layers' inputs, sines and cosines; the parameters are read where they are.
    assert shapes.count((LENGTH, *x.shape)) == 3
    assert shapes.count(kernels.shape) == 1
    assert shapes.count(bias.shape) == 1  # not once for each layer
    assert (LENGTH, *bias.shape) not in shapes


@pytest.mark.parametrize(("device", "blank"), [("TPU v5 lite", 3), ("NVIDIA H100 80GB HBM3", 0)])
def test_stacks_begin_without_values_on_a_tpu(monkeypatch, device, blank):
    monkeypatch.setattr(scanned, "tracing_device", lambda: Device(device))
    x, kernels = arrays("x", "kernels")

    def loss(x, kernels):
        return jnp.sum(scan(lambda x, kernel: (jnp.sin(x @ kernel), None), x, kernels, LENGTH)[0])

    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, kernels))
    # Two stacks of activations and one of gradients.
    assert program.count("empty[") == blank
    assert program.count(f"f32[{LENGTH},3,{WIDTH}] = broadcast_in_dim") == (0 if blank else 2)


def test_gradients_that_nobody_reads_cost_nothing():
    x, kernels, bias = arrays("x", "kernels", "bias")

    def compiled(scan, wanted):
        def loss(x, kernels, bias):
            def layer(x, kernel):
                return jnp.sin(x @ kernel) * bias, None

            return jnp.sum(scan(layer, x, kernels, LENGTH)[0])

        return jax.jit(jax.grad(loss, wanted)).lower(x, kernels, bias).compile()

    for wanted in (0, 1):
        ours, jaxs = compiled(scan, wanted), compiled(lax.scan, wanted)
        sizes = [each.memory_analysis().temp_size_in_bytes for each in (ours, jaxs)]
        assert sizes[0] <= sizes[1]
        assert ours.as_text().count(" dot(") == jaxs.as_text().count(" dot(")


def library_scan(run, layer, states, length, period):
    """Scans as `flax.linen.scan` does, which runs `jax.lax.scan`."""
    axes = {"params": layers.LAYERS_AXIS, SOWN: 0}
    splits = {"params": True, "dropout": True}
    assert period == 1

    def first(layer, states):
        return run(layer, states, 0)

    run_all = nn.scan(first, variable_axes=axes, split_rngs=splits, length=length)
    return run_all(layer, states)[0]


# Changes of a tiny model.
MODELS = {
    "t5_1_1": {"num_encoder_layers": 2, "num_decoder_layers": 3, "remat": "dots"},
    "lm": {"num_decoder_layers": 3},
    "bert": {"num_encoder_layers": 3, "dtype": "bfloat16", "position": "relative"},
    **entries("SCANNED"),
}


@pytest.mark.parametrize("family", slow_unless({"lm"}, MODELS))
def test_a_model_draws_and_learns_as_with_the_scan_of_flax(make_config, packed, family):
    config = make_config(family, scan_layers=True, dropout_rate=0.3, **MODELS[family])
    tiny = TinyModel(config)

    def result(scan):
        def loss(params):
            out = run_model(tiny.model, params, packed, jax.random.key(5))
            return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(out))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack, "scan", scan)
            return jax.jit(jax.value_and_grad(loss))(tiny.params)

    (loss, gradients), (expected, of_flax) = result(layers.scan), result(library_scan)
    assert loss == expected  # equal draws of dropout
    # JAX's scan adds the gradients of several reads in a layer to the sum one by one.
    assert_close(gradients, of_flax, scale=1e-5)


def test_parameters_in_pieces_and_their_gradients_are_those_in_rows(monkeypatch):
    def result(device):
        monkeypatch.setattr(layers, "tracing_device", lambda: Device(device))
        stacked = jnp.arange(2 * 16 * 3.0).reshape(2, 16, 3)

        def loss(stacked):
            front = layers._layers_first(stacked)
            return jnp.sum(jnp.sin(front) * jnp.arange(16.0)[:, None, None]), front

        program = jax.jit(jax.value_and_grad(loss, has_aux=True)).trace(stacked)
        return program.lower().compile()(stacked), str(program.jaxpr).count("layout_constraint")

    (rows, none), (pieces, both) = result("cpu"), result("TPU v5 lite")
    assert_equal(pieces, rows)
    assert (none, both) == (0, 2)  # the parameters and their gradients
