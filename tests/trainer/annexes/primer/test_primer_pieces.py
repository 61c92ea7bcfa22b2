"""Each part of Primer and its rivals, compared with formulas written in NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.trees import assert_close
from tests.trainer.model.conftest import unboxed
from tests.trainer.model.test_gradients_at_zero import same_elsewhere
from trainer.annexes.primer import layers
from trainer.annexes.primer.convolution import ConvolutionBranch, HeadConvolution, depthwise
from trainer.annexes.primer.layers import PrimerNorm, PrimerParametrisation
from trainer.annexes.primer.synthesizer import DenseSynthesizer, LearnedLogits
from trainer.model.attention import DotProductAttention
from trainer.model.dense import Shared
from trainer.model.feedforward import ACTIVATIONS
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.paths import named
from trainer.model.positions import Positions

B, L, D, H, K = 2, 8, 8, 2, 4
SHARED = Shared(D, 40, "float32", 0.0, PrimerParametrisation())
# The second row has two packed examples and padding.
SEGMENTS = np.array([[1] * L, [1, 1, 1, 2, 2, 2, 2, 0]])
PLACES = np.array([range(L), [0, 1, 2, 0, 1, 2, 3, 0]])
INPUTS = np.where(PLACES == 0, 0, 5)
ROWS = Rows(jnp.asarray(SEGMENTS), None, jnp.asarray(PLACES), None, jnp.asarray(INPUTS))
VISIBLE = np.tril(np.ones((L, L), bool)) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])
TOKEN = SEGMENTS > 0


def states(seed=0):
    return np.random.default_rng(seed).normal(size=(B, L, D)).astype(np.float32)


def run(spec, *arguments, name="it", changed=(), **keywords):
    """Returns (parameters by path as float64, output) with random parameters."""
    module = spec.build(SHARED, name)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *arguments))["params"]
    random = np.random.default_rng(7)
    params = jax.tree.map(
        lambda leaf: (0.3 * random.normal(size=leaf.shape)).astype(np.float32), unboxed(shapes)
    )
    leaves = named(params)
    for path, value in dict(changed).items():
        leaves[path][...] = value
    output = jax.jit(lambda p: module.apply({"params": p}, *arguments, **keywords))(params)
    return {path: leaf.astype(np.float64) for path, leaf in leaves.items()}, output


def attend(spec, rows=ROWS, changed=(), bias=None):
    positions = Positions(bias_HLS=bias)
    x = states()
    view = View(jnp.asarray(VISIBLE), positions, rows, rows)
    return run(spec, x, x, view, True, changed=changed)


def convolved(z, taps, segments=SEGMENTS):
    out = np.zeros_like(z)
    for row in range(B):
        for at in range(L):
            for back, tap in enumerate(taps):
                if at >= back and segments[row, at] == segments[row, at - back]:
                    out[row, at] += tap * z[row, at - back]
    return out


def heads(z):
    return z.reshape(B, L, H, K)


def mixed(logits, values, out):
    """Returns the softmax over visible positions, by definition."""
    result = np.zeros((B, L, H * K))
    for row in range(B):
        for at in range(L):
            seen = np.flatnonzero(VISIBLE[row, at])
            for head in range(H):
                weights = np.exp(logits[row, head, at, seen])
                mix = weights @ heads(values)[row, seen, head] / weights.sum()
                result[row, at, head * K : (head + 1) * K] = mix
    return (result @ out)[TOKEN]


def products(q, k):
    return np.einsum("blhk,bshk->bhls", heads(q), heads(k))


def agree(output, expected):
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, rtol=0, atol=1e-6)


def taps_of(params, name):
    return [params[f"{name}_convolution/tap_{step}"] for step in range(3)]


def test_squared_relu_and_its_gradient():
    x = np.linspace(-2, 2, 9)
    squared_relu = ACTIVATIONS["squared_relu"]
    agree(squared_relu(jnp.asarray(x, jnp.float32)), np.maximum(x, 0) ** 2)
    gradient = jax.vmap(jax.grad(squared_relu))(jnp.asarray(x, jnp.float32))
    agree(gradient, 2 * np.maximum(x, 0))


@pytest.mark.parametrize("reset", [True, False])
def test_multi_dconv_head_attention(reset):
    spec = DotProductAttention(H, K, HeadConvolution(reset=reset))
    p, output = attend(spec)
    x, segments = states().astype(np.float64), SEGMENTS if reset else np.ones_like(SEGMENTS)
    q, k, v = (
        convolved(x @ p[f"{name}/kernel"], taps_of(p, name), segments)
        for name in ("query", "key", "value")
    )
    agree(output[TOKEN], mixed(products(q, k), v, p["out/kernel"]))


def test_multi_dconv_head_attention_with_shared_queries_and_keys():
    p, output = attend(DotProductAttention(H, K, HeadConvolution(), shared_query_key=True))
    assert "key/kernel" not in p
    assert not any(path.startswith("key_convolution") for path in p)
    x = states().astype(np.float64)
    k = convolved(x @ p["query/kernel"], taps_of(p, "query"))
    v = convolved(x @ p["value/kernel"], taps_of(p, "value"))
    q = k @ p["query_from_key/kernel"]
    agree(output[TOKEN], mixed(products(q, k), v, p["out/kernel"]))


@pytest.mark.parametrize("segments", [SEGMENTS, np.ones_like(SEGMENTS)])
def test_the_gradients_of_a_convolution(segments):
    random = np.random.default_rng(1)
    x, gradient = random.normal(size=(2, B, L, D)).astype(np.float32)
    kernel = random.normal(size=(3, D)).astype(np.float32)
    output, backward = jax.vjp(lambda *args: depthwise(*args, jnp.asarray(segments)), x, kernel)
    agree(output, convolved(x, kernel, segments))
    x_gradient, kernel_gradient = np.zeros(x.shape), np.zeros(kernel.shape)
    for row, at, back in np.ndindex(B, L, 3):
        if at >= back and segments[row, at] == segments[row, at - back]:
            x_gradient[row, at - back] += kernel[back] * gradient[row, at]
            kernel_gradient[back] += x[row, at - back] * gradient[row, at]
    assert_close(backward(gradient), (x_gradient, kernel_gradient), rtol=1e-5, atol=2e-6)


def test_taps_start_as_upstream():
    module = HeadConvolution().build(SHARED, "it")
    params = module.init(jax.random.key(0), states(), ROWS)["params"]
    taps = [np.asarray(params[f"tap_{step}"].value) for step in range(3)]
    for tap, expected in zip(taps, (0.5, 0.5 / 3, 0.5 / 3), strict=True):
        np.testing.assert_allclose(tap, np.full(D, expected), rtol=1e-7)


@pytest.mark.parametrize("reset", [True, False])
def test_random_synthesizer_with_products(reset):
    spec = DotProductAttention(H, K, learned_logits=LearnedLogits(L + 2, reset))
    bias = np.random.default_rng(2).normal(size=(H, L, L)).astype(np.float32)
    p, output = attend(spec, bias=jnp.asarray(bias))
    x = states().astype(np.float64)
    q, k, v = (x @ p[f"{name}/kernel"] for name in ("query", "key", "value"))
    places = PLACES if reset else np.broadcast_to(np.arange(L), (B, L))
    table = p["learned_logits/table"]
    learned = np.stack([table[row][:, :, row].transpose(1, 0, 2) for row in places])
    agree(output[TOKEN], mixed(products(q, k) + learned + bias, v, p["out/kernel"]))


def test_dense_synthesizer():
    p, output = attend(DenseSynthesizer(H, K, L + 2))
    x = states().astype(np.float64)
    hidden = np.maximum(x @ p["hidden/kernel"] + p["hidden/bias"], 0)
    logits = np.einsum("blhk,hkp->bhlp", heads(hidden), p["kernel"]) + p["bias"][:, None]
    logits = np.stack([logits[row][:, :, PLACES[row]] for row in range(B)])
    agree(output[TOKEN], mixed(logits, x @ p["value/kernel"], p["out/kernel"]))


def test_rows_longer_than_a_synthesizer_knows_are_refused():
    for spec in (
        DenseSynthesizer(H, K, L - 1),
        DotProductAttention(H, K, learned_logits=LearnedLogits(L - 1)),
    ):
        with pytest.raises(ValueError, match=f"rows have {L} tokens, but the Synthesizer has 7"):
            attend(spec)


def test_primer_norm():
    x = states()
    p, output = run(PrimerNorm(), x)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    variance = np.mean(wide * centred, -1, keepdims=True)
    agree(output, centred / np.sqrt(variance + 1e-6) * p["scale"] + p["bias"])
    # Far from 0 rounding makes the mean of x (x - mean) negative for some rows.
    far = run(PrimerNorm(), 1e5 + 1e-2 * x)[1]
    assert np.all(np.isfinite(far))
    x = 3 * states().astype(np.float64) + 100
    with jax.enable_x64(True):
        ours = np.asarray(PrimerNorm().normalised(jnp.asarray(x)))
    layer_norm = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, layer_norm, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reset", [True, False])
def test_convolutions_of_the_evolved_transformer(reset):
    p, output = run(ConvolutionBranch(reset=reset), states(), ROWS, True)
    segments = SEGMENTS if reset else np.ones_like(SEGMENTS)

    def separable(x, name):
        kernel = p[f"{name}/depthwise_kernel"]
        depthwise = convolved(x * (INPUTS != 0)[..., None], kernel[::-1], segments)
        depthwise += p[f"{name}/depthwise_bias"]
        return depthwise @ p[f"{name}/pointwise/kernel"] + p[f"{name}/pointwise/bias"]

    x = states().astype(np.float64)
    left, right = np.maximum(separable(x, "left"), 0), separable(x, "right")
    assert (left.shape[-1], right.shape[-1]) == (2 * D, D // 2)
    left[..., : D // 2] += right
    centred = left - left.mean(-1, keepdims=True)
    h = centred / np.sqrt(left.var(-1, keepdims=True) + 1e-6)
    h = h * p["layer_norm/scale"] + p["layer_norm/bias"]
    agree(output, separable(h, "out"))


def test_it_has_its_bits_and_gradients_elsewhere(monkeypatch):
    same_elsewhere(layers.PrimerNorm(), layers, monkeypatch)
