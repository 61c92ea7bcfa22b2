"""Conditional queries (cdQ) and memory tokens: formulas in float64, totals, packing, gradients."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import slow_unless
from tests.trainer.model.conftest import initial, tiny_config, unboxed
from trainer.annexes.t5_experiments.layers import ConditionalQueryAttention
from trainer.config.presets import MODEL_PRESETS
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.model.attention import DotProductAttention
from trainer.model.dense import Shared
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.parametrisation import StandardParametrisation
from trainer.model.paths import named
from trainer.model.positions import Positions, RotaryPosition, rotate
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

pytestmark = pytest.mark.processes

B, L, D, G, K = 2, 7, 6, 2, 4
SHARED = Shared(D, 40, "float32", 0.0, StandardParametrisation())
# The first row is one example and padding; the second has two examples and padding.
SEGMENTS = np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 2, 2, 2, 0]])
PLACES = np.array([range(L), [0, 1, 2, 0, 1, 2, 0]])
TOKEN = SEGMENTS > 0
VISIBLE = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & TOKEN[:, None]


def softmax(x):
    exp = np.exp(x - x.max())
    return exp / exp.sum()


def formula(x, p, bias, plain, turn=lambda heads, row: heads):
    """Returns the attention of specification, example by example, head by head."""
    out = np.zeros((B, L, (1 + plain) * G * K))
    for row in range(B):
        keys, values = (turn((x[row] @ p[name]).reshape(L, G, K), row) for name in ("key", "value"))
        values = (x[row] @ p["value"]).reshape(L, G, K)
        hidden = np.maximum(x[row] @ p["pool_hidden"], 0)
        for at in np.flatnonzero(TOKEN[row]):
            seen = np.flatnonzero(VISIBLE[row, at])
            queries = []
            if plain:
                queries += list((x[row, at] @ p["query"]).reshape(G, K))
            for head in range(G):
                weights = softmax(hidden[seen] @ p["pool"][:, head])
                joined = np.concatenate([weights @ x[row, seen], x[row, at]])
                queries.append(joined @ p["condition"] @ p["conditional_query"])
            for number, query in enumerate(queries):
                head = number % G
                turned = np.repeat(query[None, None], L, 0)
                logits = keys[seen, head] @ turn(turned, row)[at, 0] + bias[head, at, seen]
                out[row, at, number * K : (number + 1) * K] = softmax(logits) @ values[seen, head]
    return out @ p["out"]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_formula(plain, rotary, packed):
    rows_of = slice(None) if packed else slice(0, 1)
    spec = ConditionalQueryAttention(G, G * plain, K)
    random = np.random.default_rng(0)
    x, bias = random.normal(size=(B, L, D)), random.normal(size=(G, L, L))
    angles = None
    if rotary:
        places = jnp.asarray(PLACES)
        angles = RotaryPosition(K).build(SHARED, G, "it").apply({}, L, L, places).angle_BLC
    positions = None if not packed else jnp.asarray(PLACES)
    rows = Rows(jnp.asarray(SEGMENTS[rows_of]), position_BL=positions)
    own = None if angles is None else angles[rows_of]
    view_of = Positions(bias_HLS=jnp.asarray(bias, jnp.float32), angle_BLC=own)
    view = View(jnp.asarray(VISIBLE[rows_of]), view_of, rows, rows)
    module, states = spec.build(SHARED, "it"), jnp.asarray(x[rows_of], jnp.float32)
    with jax.default_matmul_precision("highest"):
        boxes = jax.eval_shape(lambda: module.init(jax.random.key(0), states, states, view, True))
        params = jax.tree.map(lambda leaf: 0.3 * random.normal(size=leaf.shape), unboxed(boxes))
        single = jax.tree.map(jnp.float32, params)
        out = module.apply(single, states, states, view, True)

    def turn(heads, row):
        if angles is None:
            return heads
        own = jnp.asarray(heads[None], jnp.float32), angles[row : row + 1]
        return np.asarray(rotate(*own)[0], np.float64)

    kernels = {name: leaf["kernel"] for name, leaf in params["params"].items()}
    expected = formula(x, kernels, bias, plain, turn)[rows_of]
    token = TOKEN[rows_of]
    np.testing.assert_allclose(out[token], expected[token], rtol=0, atol=1e-6)
    assert ("query" in kernels) == plain


TOTALS = [
    ("t5_1_0_base", 222_903_552),
    ("t5_1_0_base_cdq", 234_165_312),
    ("t5_1_0_base_only_cdq", 237_759_744),
    ("t5_1_0_small_memory_10", 60_511_744),
    ("t5_1_0_micro", 45_821_440),
]


@pytest.mark.parametrize(("name", "total"), slow_unless([TOTALS[1], TOTALS[3]], TOTALS))
def test_totals(name, total):
    """Source: t5-experiments, its configurations instantiated."""
    assert parameter_count(MODEL_PRESETS[name]) == total


def test_initial_deviations():
    d, k, h = 192, 16, 6
    sizes = {"emb_dim": d, "head_dim": k, "num_heads": 2 * h, "mixer": "cdq:conditional_heads=6"}
    spec = model_spec(tiny_config("t5_1_0", **sizes))
    expected = {
        "pool": h * d, "pool_hidden": d * d, "conditional_query": d * k, "condition": 2 * d * d,
        "query": d * k,
    }  # fmt: skip
    paths = {f"encoder/layers_0/attention/{name}/kernel": n for name, n in expected.items()}
    for path, kernel in initial(spec, *paths).items():
        tolerance = 0.03 if kernel.size > 5000 else 0.07
        assert np.std(kernel) * paths[path] ** 0.5 == pytest.approx(1, abs=tolerance), path


def test_the_decoder_beside_it_has_attention(make_config):
    spec = model_spec(make_config("t5_1_0", mixer="cdq"))
    assert isinstance(spec.encoder.layers[0].mixer, ConditionalQueryAttention)
    decoder = spec.decoder.layers[0]
    assert isinstance(decoder.mixer, DotProductAttention)
    assert isinstance(decoder.cross_mixer, DotProductAttention)


VARIANTS = {
    "cdq": {"mixer": "cdq"},
    "half": {"mixer": "cdq:conditional_heads=1"},
    "memory": {"stack_parts": "memory_tokens:count=3"},
    "both": {"mixer": "cdq", "stack_parts": "memory_tokens:count=2"},
}


@pytest.mark.parametrize("variant", slow_unless({"both"}, VARIANTS))
def test_gradients_reach_every_tensor(make_tiny, batch, variant):
    tiny = make_tiny("t5_1_0", **VARIANTS[variant])

    def loss(params):
        return jnp.sum(jnp.square(tiny.model.apply({"params": params}, batch)))

    for path, gradient in named(jax.jit(jax.grad(loss))(tiny.params)).items():
        assert float(jnp.abs(gradient).max()) > 1e-6, path


def test_memory_tokens_are_positions_in_front(make_tiny, batch):
    # The states are those of a model without memory whose first tokens embed as the memory.
    n, tiny = 3, make_tiny("t5_1_0", stack_parts="memory_tokens:count=3")
    plain = make_tiny("t5_1_0")
    params = dict(tiny.params)
    memory_ND = params.pop("memory_embedder")["embedding"]
    ids = np.arange(30, 30 + n)  # ids that the batch does not use
    table = params["token_embedder"]["embedding"].at[ids].set(memory_ND)
    params["token_embedder"] = {"embedding": table}
    longer = np.concatenate([ids[None], batch["encoder_input_tokens"]], axis=1)
    expected = plain.apply({**batch, "encoder_input_tokens": jnp.asarray(longer)}, params)
    found = tiny.apply(batch)
    np.testing.assert_allclose(found[:, :-1], expected[:, :-1], rtol=1e-6, atol=1e-6)
    without = plain.apply(batch, params)
    assert np.abs(found - without)[:, :-1].max() > 1e-2
    states = tiny.apply(batch, method="encode")
    assert states.shape[1] == n + batch["encoder_input_tokens"].shape[1]
    tiny = make_tiny("t5_1_0", stack_parts="memory_tokens:count=3")
    segments = {"encoder_segment_ids": jnp.ones_like(batch["encoder_input_tokens"])}
    with pytest.raises(ValueError, match="memory_tokens need rows of one example"):
        tiny.apply(batch | segments)


def test_memory_starts_as_unit_normal_and_costs_operations(make_config):
    config = make_config("t5_1_0", stack_parts="memory_tokens:count=100")
    start = initial(model_spec(config), "memory_embedder/embedding")
    assert np.std(start) == pytest.approx(1, abs=0.1)
    assert not parameter_facts(model_spec(config))["memory_embedder/embedding"].use.decays
    without = replace(config, stack_parts="none")
    assert flops_per_step(config, 2, 7, 6) == flops_per_step(without, 2, 107, 6)
