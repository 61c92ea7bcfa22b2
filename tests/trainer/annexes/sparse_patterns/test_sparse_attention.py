"""Block-sparse attention equals attention over all keys with the layout as a mask.

As a program, it compares eight devices with one and prints the differences as JSON.
"""

import itertools
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import eight_devices
from tests.support.parameters import slow_unless
from tests.support.trees import assert_close
from tests.trainer.model.conftest import TinyModel, tiny_config
from trainer.annexes.sparse_patterns import sparse_layouts
from trainer.annexes.sparse_patterns.sparse_attention import Dropping, block_sparse_attention
from trainer.config import MeshConfig
from trainer.engine.sharding import make_mesh, parameter_shardings, tracing_on
from trainer.engine.sharding import rows as rows_on
from trainer.model.attention_cores import CORES
from trainer.model.masks import Mask, Rows
from trainer.model.positions import T5RelativePosition, alibi_slopes
from trainer.model.sparsity import Pattern
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params, logical_axes

pytestmark = pytest.mark.processes

ENCODER, DECODER, PREFIX = Mask(), Mask(causal=True), Mask(causal=True, prefix=True)
MASKS = {"bidirectional": ENCODER, "unidirectional": DECODER, "prefix": PREFIX}
PATTERNS = {
    "local": sparse_layouts.Local(4),
    "longformer": sparse_layouts.Local(4, global_blocks="0+2"),
    "dilated": sparse_layouts.Dilated(4, 5),
    "bigbird": sparse_layouts.BigBird(4, 1, per_head=True),
    "fixed": sparse_layouts.Fixed(4, 2, horizontal=True, head_patterns=2),
    "variable": sparse_layouts.Variable(4, "1+2", "1", random_blocks=1),
}
B, L, H, K = 2, 26, 4, 8


def bias_by_distance(kind: str) -> jax.Array | None:
    distance = np.arange(1 - L, L)
    if kind == "relative":
        table = np.random.default_rng(1).normal(size=(H, 32))
        return jnp.asarray(table[:, T5RelativePosition(True).bucket(distance)], jnp.float32)
    if kind == "alibi":
        return jnp.asarray(-alibi_slopes(H)[:, None] * np.abs(distance), jnp.float32)
    return None


def rows_of(mask, seed: int = 0) -> Rows:
    """Returns two rows of packed examples, one with padding in front, too."""
    segment = np.array([[1] * 9 + [2] * 13 + [0] * 4, [0] * 2 + [1] * 11 + [3] * 13])
    prefix = np.random.default_rng(seed).integers(0, 2, (B, L)) if mask == PREFIX else None
    return Rows(jnp.asarray(segment), None if prefix is None else jnp.asarray(prefix))


def dense(pattern, mask, rows, bias_HC, scale, q, k, v):
    """Writes all logits out; queries that see nothing get zeros."""
    k, v = (jnp.repeat(x, H // x.shape[2], 2) for x in (k, v))
    layout = pattern.layout(H, -(-L // pattern.block), mask != ENCODER)
    spread = np.kron(layout, np.ones((pattern.block, pattern.block), bool))[:, :L, :L]
    visible = mask(rows, rows)[:, None] & spread[None]
    logits = jnp.einsum("blhk,bshk->bhls", q, k, precision="highest")
    if bias_HC is not None:
        logits += bias_HC[:, np.arange(L)[None] - np.arange(L)[:, None] + L - 1]
    weights = jax.nn.softmax(jnp.where(visible, logits * scale, -1e30)) * visible
    return jnp.einsum("bhls,bshk->blhk", weights, v, precision="highest")


def sparse(pattern, mask, rows, bias_HC, scale, q, k, v):
    with jax.default_matmul_precision("highest"):
        return block_sparse_attention(q, k, v, rows, mask, pattern, bias_HC, scale)


QUICK = {("local", "unidirectional"), ("bigbird", "unidirectional"), ("fixed", "prefix")}
QUICK |= {(name, "bidirectional") for name in PATTERNS}
CASES = [*itertools.product(PATTERNS, MASKS)]


@pytest.mark.parametrize(("name", "mask"), slow_unless(QUICK, CASES))
def test_sparse_equals_dense_masked(name, mask):
    kinds = {"bidirectional": "relative", "unidirectional": "alibi", "prefix": "none"}
    groups = {"bidirectional": H, "unidirectional": 2, "prefix": 1}[mask]
    bias_HC = bias_by_distance(kinds[mask])
    random = np.random.default_rng(0)
    shapes = (B, L, H, K), (B, L, groups, K), (B, L, groups, K), (B, L, H, K)
    q, k, v, gradient = (jnp.asarray(random.normal(size=s), jnp.float32) for s in shapes)

    def run(function, operands, bias_HC):
        attend = partial(function, PATTERNS[name], MASKS[mask], rows_of(MASKS[mask]))
        out, pull = jax.vjp(lambda bias, *each: attend(bias, 0.4, *each), bias_HC, *operands)
        return out, pull(gradient)

    actual, expected = (jax.jit(partial(run, each))((q, k, v), bias_HC) for each in (sparse, dense))
    assert_close(actual, expected, rtol=1e-5, scale=1e-5)
    # Padding sees nothing: zeros, and zero gradients.
    padding = np.asarray(rows_of(MASKS[mask]).segment_BL) == 0
    for each in (actual[0], *actual[1][-3:]):
        assert not np.asarray(each)[padding].any()


@dataclass(frozen=True)
class LayoutMask:
    """A mask, and a layout as a mask of all keys."""

    mask: Mask
    pattern: Pattern
    causal: bool

    def __call__(self, query: Rows, key: Rows) -> jax.Array:
        length = query.segment_BL.shape[1]
        (layout,) = self.pattern.layout(1, -(-length // self.pattern.block), self.causal)
        size = self.pattern.block
        spread = np.kron(layout, np.ones((size, size), bool))[None, :length, :length]
        return self.mask(query, key) & spread


class Model(NamedTuple):
    """A family, its changes and whether its rows are packed."""

    family: str
    changes: dict
    prefix: bool = False


MODELS = {
    "T5": Model("t5_1_1", {}),
    "T5, scan": Model("t5_1_1", {"position": "relative_per_layer", "scan_layers": True}),
    "BERT": Model("bert", {}),
    "BERT, rotary": Model("bert", {"position": "rotary", "head_dim": 8}),
    "LM, ALiBi, prefix": Model("lm", {"position": "alibi"}, prefix=True),
    "Llama, remat": Model("llama", {"num_kv_heads": 1, "query_key_norm": True, "remat": "full"}),
    "Llama, dropout": Model("llama", {"num_kv_heads": 1, "dropout_rate": 0.2}),
    "Primer": Model("primer", {"mixer": "mdha"}),
    "T5, dropout": Model("t5_1_1", {"dropout_rate": 0.2}),
    "T5, bfloat16": Model("t5_1_1", {"dtype": "bfloat16"}),
}


def packed_batch(prefix: bool) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    segment = np.array([[1] * 6 + [2] * 7 + [0] * 2])
    tokens = np.where(segment > 0, random.integers(1, 40, segment.shape), 0)
    sides = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = dict.fromkeys(sides, tokens)
    batch |= dict.fromkeys(("encoder_segment_ids", "decoder_segment_ids"), segment)
    marks = np.array([[1, 1, 1, 0, 0, 0] + [1, 1, 0, 0, 0, 0, 0] + [0] * 2])
    return batch | ({"decoder_causal_attention": marks} if prefix else {})


@pytest.mark.parametrize("name", slow_unless({"Llama, dropout", "LM, ALiBi, prefix"}, MODELS))
def test_models_with_a_pattern_are_models_with_its_mask(make_tiny, name):
    family, changes, prefix = MODELS[name]
    pattern = sparse_layouts.BigBird(2, 1, random_blocks=1)
    text = "bigbird:block=2,window=1"
    tiny = make_tiny(family, attention_pattern=text, **changes)
    full = make_tiny(family, **changes)

    def masked(stack, causal):
        return replace(stack, mask=LayoutMask(stack.mask, pattern, causal))

    stacks = {
        role: masked(stack, causal=role == "decoder") for role, stack in full.spec.stacks.items()
    }
    other = build_model(replace(full.spec, **stacks))
    batch = packed_batch(prefix)
    drops = {"deterministic": False, "rngs": {"dropout": jax.random.PRNGKey(0)}}
    arguments = drops if "dropout_rate" in changes else {}

    def loss(model, params):
        out = model.apply({"params": params}, batch, **arguments)
        logits = out if isinstance(out, jax.Array) else out.logits_BLV
        weights = batch["decoder_target_tokens"] > 0
        logits = jnp.where(weights[..., None], logits, 0)
        return (logits * jnp.sin(jnp.arange(logits.size).reshape(logits.shape))).mean(), logits

    with jax.default_matmul_precision("highest"):
        results = [
            jax.jit(jax.value_and_grad(partial(loss, model), has_aux=True))(tiny.params)
            for model in (tiny.model, other)
        ]
    unlike = jax.jit(partial(loss, full.model))(tiny.params)[1] - results[0][0][1]
    assert np.abs(unlike).max() > 1e-2
    tolerance = 0.05 if "dtype" in changes else 1e-5
    assert_close(*results, rtol=tolerance, atol=1e-3 * tolerance, scale=tolerance)


def test_each_query_drops_weights_of_its_own():
    length, pattern = 32, sparse_layouts.Local(8)
    rows = Rows(jnp.ones((1, length), int))
    q = jnp.zeros((1, length, 2, length))
    # Values that tell keys apart: the result is the weights.
    v = jnp.broadcast_to(jnp.eye(length)[None, :, None], q.shape)
    dropping = Dropping(0.25, jax.random.PRNGKey(0))

    def attend(v):
        return block_sparse_attention(q, q, v, rows, ENCODER, pattern, None, 1.0,
                                      dropping=dropping)  # fmt: skip

    weights, pull = jax.vjp(jax.jit(attend), v)
    seen = np.kron(pattern.layout(1, 4, False)[0], np.ones((8, 8)))[:, None]
    kept = np.asarray(weights[0]) * seen.sum(axis=2, keepdims=True) * 0.75
    np.testing.assert_allclose(kept, np.where(kept > 0, 1, 0), atol=1e-6)
    assert 0.2 < 1 - kept.sum() / (2 * seen.sum()) < 0.3
    assert len(np.unique(kept[8:24, 0, 8:24], axis=0)) > 10
    # The backward pass drops the same: values are mixed by the transposed weights.
    (gradient,) = pull(v)
    np.testing.assert_allclose(gradient[0], np.asarray(weights[0]).transpose(2, 1, 0), atol=1e-6)


def test_a_block_beyond_the_row_is_full_attention():
    batch = packed_batch(prefix=False)
    one, other = (TinyModel("lm", attention_pattern=p) for p in ("full", "local:block=1000000000"))
    np.testing.assert_array_equal(one.apply(batch), other.apply(batch))


def on_eight_devices() -> list[float]:
    """Returns how far losses and gradients on a mesh are from those on one device."""
    found = []
    length, devices = 300, make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    segment = np.where(np.arange(length) < [[300], [280], [200], [250]], 1, 0)
    segment[0, 100:] = 2
    tokens = np.random.default_rng(0).integers(1, 40, segment.shape) * (segment > 0)
    batch = dict.fromkeys(("decoder_input_tokens", "decoder_target_tokens"), tokens)
    batch["decoder_segment_ids"] = segment
    sizes = {"emb_dim": 16, "num_heads": 4, "head_dim": 64}
    sizes["attention_pattern"] = "bigbird:block=32,window=1,per_head=true"
    for attention in sorted({"einsum", "pallas"} & {*CORES}):
        spec = model_spec(tiny_config("lm", attention=attention, **sizes))
        model, params = build_model(spec), init_params(spec, jax.random.PRNGKey(0))

        def loss(params, batch, model=model):
            logits = model.apply({"params": params}, batch)
            return jnp.where(batch["decoder_target_tokens"][..., None] > 0, logits**2, 0).mean()

        one = jax.jit(jax.value_and_grad(loss))(params, batch)
        with tracing_on(devices, "2d"):
            shardings = parameter_shardings(devices, "2d", params, logical_axes(spec))
            eight = jax.jit(jax.value_and_grad(loss), in_shardings=(shardings, rows_on(devices)))(
                params, batch
            )
        pairs = zip(jax.tree.leaves(eight), jax.tree.leaves(one), strict=True)
        found += [float(np.abs(mine - its).max() / np.abs(its).max()) for mine, its in pairs]
    return found


@pytest.mark.slow
def test_a_mesh_of_eight_devices_computes_the_same():
    found = eight_devices.run(__file__)
    assert len(found) > 10
    assert max(found) < 1e-5


if __name__ == "__main__":
    print(json.dumps(on_eight_devices()))
