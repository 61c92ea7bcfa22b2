"""Transient-global attention, written out key by key in float64."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.trainer.model.conftest import tiny_config, unboxed
from trainer.model.masks import Rows
from trainer.model.mixers import View
from trainer.model.spec import model_spec

H, K, D, BLOCK, REACH = 2, 4, 12, 3, 1
# Examples with two blocks and a token more, without a block, and with one; then with three and two
# tokens more.
SEGMENTS = np.array([[1] * 7 + [2] * 2 + [3] * 3 + [0], [1] * 11 + [0] * 2])
PLACES = np.array([[*range(7), *range(2), *range(3), 0], [*range(11), 0, 1]])
CONFIG = tiny_config(
    "t5_1_1",
    attention_window=f"transient_global:window={2 * REACH + 1},block={BLOCK}",
    position="relative:num_buckets=8,max_distance=6",
)
STACK = model_spec(CONFIG).encoder


def attended(q, keys, values, logits):
    """Returns a head's mix of values for one query."""
    logits = np.array([q @ key for key in keys]) + np.array(logits)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ np.array(values)


def formula(x, p, table, side, bucket):
    """Returns the output for the states of one example, [L, D]."""
    q, k, v = ((x @ p[name]["kernel"]).reshape(-1, H, K) for name in ("query", "key", "value"))
    full = len(x) // BLOCK
    sums = [x[b * BLOCK : (b + 1) * BLOCK if b < full - 1 else len(x)].sum(0) for b in range(full)]
    scale = p["global_input_layer_norm"]["scale"]
    normed = [each / np.sqrt(np.mean(each**2) + 1e-6) * scale for each in sums]
    side_k, side_v = (
        [(each @ p[name]["kernel"]).reshape(H, K) for each in normed] for name in ("key", "value")
    )
    out = np.zeros((len(x), H, K))
    for at, head in np.ndindex(len(x), H):
        near = [key for key in range(len(x)) if abs(key - at) <= REACH]
        own = min(at // BLOCK, full - 1)
        logits = [table[head, bucket(np.array(key - at))] for key in near]
        logits += [side[head, bucket(np.array(block - own))] for block in range(full)]
        out[at, head] = attended(
            q[at, head],
            [k[key, head] for key in near] + [each[head] for each in side_k],
            [v[key, head] for key in near] + [each[head] for each in side_v],
            logits,
        )
    return out.reshape(len(x), -1) @ p["out"]["kernel"]


def test_each_example_sees_its_window_and_its_blocks():
    shared = model_spec(CONFIG).shared
    rows = Rows(jnp.asarray(SEGMENTS), position_BL=jnp.asarray(PLACES))
    length = SEGMENTS.shape[1]
    position = STACK.position.build(shared, H, "it")
    mixer = STACK.layers[0].mixer.build(shared, "it")
    random = np.random.default_rng(0)
    x = random.normal(size=(2, length, D))
    states = jnp.asarray(x, jnp.float32)

    def drawn(make):
        shapes = unboxed(jax.eval_shape(make))
        return jax.tree.map(lambda leaf: 0.5 * random.normal(size=leaf.shape), shapes)

    key = jax.random.key(0)
    tables = drawn(lambda: position.init(key, length, length, None))
    positions = position.apply(jax.tree.map(jnp.float32, tables), length, length, None)
    view = View(STACK.mask(rows, rows), positions, rows, rows)
    params = drawn(lambda: mixer.init(key, states, states, view, True))
    with jax.default_matmul_precision("highest"):
        out = mixer.apply(jax.tree.map(jnp.float32, params), states, states, view, True)
    table, side = (each["rel_embedding"] for each in (tables["params"], tables["params"]["blocks"]))
    for row, segment in ((0, 1), (0, 2), (0, 3), (1, 1)):
        here = SEGMENTS[row] == segment
        expected = formula(x[row, here], params["params"], table, side, STACK.position.bucket)
        np.testing.assert_allclose(out[row, here], expected, rtol=0, atol=1e-5)


def test_the_decoder_sees_everything():
    decoder = model_spec(CONFIG).decoder
    assert decoder.mask.window is None
    costs = [stack.layers[0].mixer.products_per_pair for stack in (decoder, STACK)]
    assert costs == [2 * H * K, round(2 * H * K * 4 / 3)]
    assert type(decoder.layers[0].mixer) is not type(STACK.layers[0].mixer)
