"""Kernels visit what a pattern does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.parameters import slow_unless
from tests.support.trees import assert_close
from trainer.annexes.kernels.fused_attention import fused_attention
from trainer.annexes.kernels.fused_sparsity import tables_of
from trainer.model.masks import Mask, Rows
from trainer.model.positions import RelativeBias, T5RelativePosition
from trainer.model.sparsity import visited

layouts = pytest.importorskip("trainer.annexes.sparse_patterns.sparse_layouts")
by_blocks = pytest.importorskip("trainer.annexes.sparse_patterns.sparse_attention")
MASKS = {
    "bidirectional": Mask(),
    "unidirectional": Mask(causal=True),
    "prefix": Mask(causal=True, prefix=True),
}


@pytest.mark.parametrize(
    ("pattern", "tile"),
    [
        (layouts.BigBird(16, per_head=True), 32),
        (layouts.Local(64), 32),
        (layouts.Fixed(32, head_patterns=2), 32),
    ],
)
@pytest.mark.parametrize("predicate", [Mask(), Mask(True), Mask(True, True)])
def test_tables_visit_and_mask_what_the_layout_leaves(pattern, tile, predicate):
    heads, length = 3, 200
    visits, tables = tables_of(pattern, heads, 64, length, predicate, tile=tile)
    blocks = -(-length // tile)
    seen = np.zeros((heads, blocks * tile, blocks * tile), bool)
    keys = tables.keys.reshape(-1, blocks, visits.most_keys)
    counts = tables.key_counts.reshape(-1, blocks)
    queries = tables.queries.reshape(-1, blocks, visits.most_queries)
    query_counts = tables.query_counts.reshape(-1, blocks)
    for head in range(heads):
        group = head // 2 if visits.by_group else 0
        for i in range(blocks):
            for j in keys[group, i, : counts[group, i]]:
                assert i in queries[group, j, : query_counts[group, j]]
                tile_qk = np.ones((tile, tile), bool)
                if tables.bits is not None:
                    own = head % 2 if visits.by_group else 0
                    bits_q = tables.bits[group, own * blocks + j, i * tile : (i + 1) * tile]
                    tile_qk = (bits_q[:, None] >> (np.arange(tile) // visits.part) & 1) > 0
                seen[head, i * tile : (i + 1) * tile, j * tile : (j + 1) * tile] = tile_qk
    layout = visited(pattern, heads, length, predicate.causal, predicate.prefix)
    expected = np.kron(layout, np.ones((pattern.block, pattern.block), bool))[:, :length, :length]
    seen = seen[:, :length, :length]
    if predicate == Mask(True):
        # The kernels' causal mask hides what is after a query in any case.
        seen, expected = np.tril(seen), np.tril(expected)
    np.testing.assert_array_equal(seen, np.broadcast_to(expected, seen.shape))


def test_auto_is_the_kernel_where_tiles_fit_the_blocks(make_config):
    def chosen(block, kind="TPU v5 lite"):
        config = make_config(
            "t5_1_1", dtype="bfloat16", head_dim=64, attention_pattern=f"local:block={block}"
        )
        return config.attention_on(kind)

    assert [chosen(block) for block in (16, 384, 48)] == ["pallas", "pallas", "einsum"]
    # The kernels for GPUs have no patterns.
    assert chosen(16, "NVIDIA H100 80GB HBM3") == "einsum"


KERNELS = {
    "bidirectional": (layouts.BigBird(8, 1, per_head=True), 64, 4, "relative", 16),
    "unidirectional": (layouts.Local(32, global_blocks="1"), 128, 2, "relative", 16),
    "prefix": (layouts.Fixed(16, 4, head_patterns=2), 64, 3, "none", 16),
}


@pytest.mark.parametrize("mask", slow_unless({"unidirectional", "prefix"}, KERNELS))
def test_kernels_visit_the_tiles_of_a_layout(mask):
    pattern, head_dim, heads, bias, tile = KERNELS[mask]
    length, random = 104, np.random.default_rng(0)
    index = np.arange(length)
    rows = Rows(
        jnp.asarray(np.stack([1 + (index >= 70), np.where(index < 90, 1 + (index >= 20), 0)])),
        jnp.asarray(random.integers(0, 2, (2, length))) if mask == "prefix" else None,
    )
    known = MASKS[mask]
    table_HR = jnp.asarray(random.normal(size=(heads, 32)), jnp.float32)
    relative = T5RelativePosition(mask == "bidirectional", max_distance=20)
    distances = relative.bucket(np.arange(1 - length, length))
    layout = tables_of(pattern, heads, head_dim, length, known, tile=tile)
    assert layout[0].tiles < 0.8 * (-(-length // tile)) ** 2

    def by_kernels(q, k, v, table):
        return fused_attention(
            *(q, k, v, rows, rows, head_dim, known),
            relative=RelativeBias(table, relative) if bias == "relative" else None,
            scale=0.3,
            interpret=True,
            layout=layout,
        )

    def without(q, k, v, table):
        heads_of = [x.reshape(2, length, heads, head_dim) for x in (q, k, v)]
        bias_HC = table[:, distances] if bias == "relative" else None
        mixed = by_blocks.block_sparse_attention(*heads_of, rows, known, pattern, bias_HC, 0.3)
        return mixed.reshape(q.shape)

    operands = [
        jnp.asarray(random.normal(size=(2, length, heads * head_dim)), jnp.float32)
        for _ in range(4)
    ]

    def run(function, *operands):
        out, pull = jax.vjp(function, *operands[:3], table_HR)
        return out, pull(operands[3])

    with jax.default_matmul_precision("highest"):
        actual, expected = (
            jax.jit(partial(run, each))(*operands) for each in (by_kernels, without)
        )
    assert_close(actual, expected, rtol=1e-5, scale=1e-5)
