"""Fused attention equals attention with its logits written out, in every gradient.

As a program, `test_fused_attention.py TOPOLOGY`, it compiles the kernels for a TPU.
"""

import itertools
import os
import sys
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.parameters import slow_unless
from tests.support.processes import ROOT, started
from trainer.annexes.kernels import fused_attention as fused
from trainer.annexes.kernels import fused_tiles
from trainer.annexes.kernels.fused_sparsity import tables_of
from trainer.annexes.kernels.hardware import buffers_of, kernel_bytes
from trainer.model.dense import Order, side_by_side
from trainer.model.masks import Mask, Rows
from trainer.model.positions import RelativeBias, T5RelativePosition

ENCODER, DECODER, PREFIX = Mask(), Mask(causal=True), Mask(causal=True, prefix=True)
LOCAL, BOTH_WAYS = Mask(causal=True, window=19), Mask(window=6, ahead=21)
B = 2


class Neighbours(NamedTuple):
    """A pattern of blocks that see those beside them, in the first head, or the first block."""

    block: int

    def layout(self, num_heads, blocks, causal):
        near = np.abs(np.subtract.outer(np.arange(blocks), np.arange(blocks))) <= 1
        first = np.eye(blocks, dtype=bool) | (np.arange(blocks) == 0)
        return np.stack([first if head else near for head in range(num_heads)])


class Case(NamedTuple):
    """The static part of a call. `unrolled` is the number of elements above which kernels loop."""

    mask: object
    length: int
    source_length: int
    biased: bool
    head_dim: int = 64
    num_heads: int = 2
    dtype: str = "float32"
    block: int | None = 16
    scale: float = 1.0
    unrolled: int = 1 << 12
    pattern: object = None
    shared: int = 1  # heads of queries per head of keys and values
    softcap: float | None = None


CASES = {
    "encoder": Case(ENCODER, 32, 32, True, num_heads=1, block=32),
    "encoder, loops": Case(ENCODER, 76, 76, True, unrolled=1),
    "decoder": Case(DECODER, 28, 28, True, num_heads=1),
    "decoder, loops": Case(DECODER, 40, 40, True, scale=0.125, unrolled=1),
    "prefix": Case(PREFIX, 20, 20, True, dtype="bfloat16", block=32),
    "prefix, loops": Case(PREFIX, 40, 40, False, head_dim=128, num_heads=1, unrolled=1),
    "cross": Case(ENCODER, 14, 30, False, block=None),
    "cross, loops": Case(ENCODER, 40, 20, False, dtype="bfloat16", scale=0.125, unrolled=1),
    "window": Case(LOCAL, 28, 28, True, num_heads=1, softcap=1.5),
    "window, loops": Case(LOCAL, 76, 76, False, unrolled=1, dtype="bfloat16"),
    "window of a prefix": Case(LOCAL._replace(prefix=True), 60, 60, True, num_heads=1, unrolled=1),
    "window of an encoder": Case(BOTH_WAYS, 44, 44, True, num_heads=1),
    "window of an encoder, loops": Case(BOTH_WAYS, 76, 76, False, unrolled=1, softcap=0.5),
    "narrow window": Case(Mask(causal=True, window=2), 40, 40, False, num_heads=1, unrolled=1),
    "cap, loops": Case(DECODER, 40, 40, True, scale=0.125, unrolled=1, softcap=2.0),
}
# The others belong to `make test-processes`.
FAST = ("encoder", "decoder, loops", "prefix", "cross", "window", "window of an encoder, loops")


def bias_of(case):
    # So near that distant blocks share a tile.
    return T5RelativePosition(bidirectional=not case.mask.causal, max_distance=20)


def attend(case, q, k, v, table, query, key, bias_of=bias_of, **more):
    return fused.fused_attention(
        *(q, k, v, query, key, case.head_dim, case.mask),
        relative=RelativeBias(table, bias_of(case)) if case.biased else None,
        scale=case.scale,
        **{"block": case.block, "interpret": True, "softcap": case.softcap} | more,
    )


def write_out(case, q, k, v, table, query, key):
    """The same in float32, with zeros where a query sees nothing."""

    def heads(x):
        x = x.astype(jnp.float32).reshape(B, x.shape[1], -1, case.head_dim)
        return jnp.repeat(x, case.num_heads // x.shape[2], axis=2)

    logits = jnp.einsum("blhk,bshk->bhls", heads(q), heads(k), precision="highest")
    if case.biased:
        distance = np.arange(case.source_length) - np.arange(case.length)[:, None]
        logits += table[:, bias_of(case).bucket(distance)]
    mask = case.mask(query, key)[:, None]
    logits *= case.scale
    if case.softcap is not None:
        logits = case.softcap * jnp.tanh(logits / case.softcap)
    weights = jax.nn.softmax(jnp.where(mask, logits, -1e30)) * mask
    return jnp.einsum("bhls,bshk->blhk", weights, heads(v), precision="highest").reshape(q.shape)


@cache
def compiled(case, function):
    """Returns (output, gradients) of operands, rows and the gradient of the output."""

    def run(operands, rows, gradient):
        out, pull = jax.vjp(lambda *operands: function(case, *operands, *rows), *operands)
        return out, pull(gradient.astype(out.dtype))

    return jax.jit(run)


def example(case, seed):
    """Returns random operands, rows with padding, packed examples and prefixes, and a gradient."""
    random = np.random.default_rng(seed)

    def normal(length, scale=1.0, heads=case.num_heads):
        shape = (B, length, heads * case.head_dim)
        return jnp.asarray(scale * random.normal(size=shape), case.dtype)

    def rows(length):
        index = np.arange(length)
        full, second = random.integers(0, length + 1, (2, B, 1))
        segment = np.where(index < full, 1 + (index >= second), 0)
        prefix = random.integers(0, 2, (B, length)) if case.mask.prefix else None
        return Rows(jnp.asarray(segment), None if prefix is None else jnp.asarray(prefix))

    length, source_length = case.length, case.source_length
    query = rows(length)
    key = query if length == source_length else rows(source_length)
    table = jnp.asarray(random.normal(size=(case.num_heads, 32)), jnp.float32)
    size = (case.head_dim * case.scale) ** -0.25 * 1.5
    few = case.num_heads // case.shared
    k, v = normal(source_length, size, few), normal(source_length, heads=few)
    return (normal(length, size), k, v, table), (query, key), normal(length)


@pytest.mark.parametrize("name", slow_unless(FAST, CASES, pytest.mark.processes))
@settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_outputs_and_gradients_are_those_of_logits_written_out(name, seed):
    case = CASES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_tiles, "_UNROLLED_FORWARD", case.unrolled)
        patch.setattr(fused_tiles, "_UNROLLED_BACKWARD", case.unrolled)
        operands, rows, gradient = example(case, seed)
        actual = compiled(case, attend)(operands, rows, gradient)
    assert_written_out(case, actual, operands, rows, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [ENCODER, Mask(causal=True, window=3000)])
def test_a_row_of_16384_tokens_equals_its_documents(mask):
    length, ends = 16_384, (0, 5000, 13_997, 16_380)
    random = np.random.default_rng(0)
    q, k, v = jnp.asarray(random.normal(size=(3, 1, length, 64)), jnp.float32)
    table = jnp.asarray(random.normal(size=(1, 32)), jnp.float32)
    relative = RelativeBias(table, T5RelativePosition(bidirectional=not mask.causal))
    segments = np.searchsorted(ends[1:], np.arange(length), side="right") + 1

    def attended(part, segment):
        rows = Rows(jnp.asarray(segment)[None])
        arrays = (each[:, part] for each in (q, k, v))
        run = partial(fused.fused_attention, head_dim=64, predicate=mask, relative=relative)
        return np.asarray(run(*arrays, rows, rows, vmem_bytes=64 << 20, interpret=True))

    assert buffers_of(length, 64 << 20) == 1
    packed = attended(slice(None), np.where(segments > 3, 0, segments))
    for begin, end in itertools.pairwise(ends):
        alone = attended(slice(begin, end), np.ones(end - begin, np.int32))
        np.testing.assert_allclose(packed[:, begin:end], alone, atol=1e-5)
    assert not packed[:, ends[-1] :].any()


def assert_written_out(case, actual, operands, rows, gradient):
    floats = [x.astype(jnp.float32) for x in operands]
    expected = compiled(case, write_out)(floats, rows, gradient.astype(jnp.float32))
    # In bfloat16 the weights are rounded, and then the result.
    tolerance = 1e-5 if case.dtype == "float32" else 1.5 * float(jnp.finfo(jnp.bfloat16).eps)
    names = ("output", "queries", "keys", "values", "table")
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for what, (mine, theirs) in zip(names, pairs, strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs)
        # Rounding is all there is where each query sees one key, which has no gradient.
        error = np.abs(mine - theirs).max() / max(np.abs(theirs).max(), 0.3)
        assert error <= tolerance, f"{what}: {error:.1e}"


@pytest.mark.parametrize(
    "name", slow_unless(FAST, ["decoder", "prefix", "cross, loops"], pytest.mark.processes)
)
def test_kernels_read_what_one_product_projects(name):
    """Each group's queries, keys and values in one array, or its keys and values."""
    case = CASES[name]._replace(num_heads=2, head_dim=128)  # two groups
    operands, rows, gradient = example(case, 1)
    actual = compiled(case, joining(attend, 2))(operands, rows, gradient)
    assert_written_out(case, actual, operands, rows, gradient)


@cache
def joining(attend, pieces):
    order = Order(1, pieces)

    def joined(case, q, k, v, table, *rows):
        if q.shape == k.shape:
            return attend(case, side_by_side([q, k, v], order), None, None, table, *rows)
        return attend(case, q, side_by_side([k, v], order), None, table, *rows)

    return joined


def test_distant_blocks_share_a_tile_of_the_bias():
    plan = partial(fused.Plan, head_dim=64, scale=1.0, vmem_bytes=0, interpret=True)
    sides = {"length": 2048, "source_length": 2048, "block_q": 256, "block_k": 256}
    both = plan(predicate=ENCODER, bias=T5RelativePosition(True), **sides)
    causal = plan(predicate=DECODER, bias=T5RelativePosition(False), **sides)
    assert (both.tiles, causal.tiles) == (5, 3)
    assert both.tile(0, 0, 7) == both.tile(0, 0, 2) == 0
    assert both.tile(1, 7, 0) == both.tile(1, 2, 0) == 9


# One of each family: T5's encoder, decoder and cross attention, a decoder with prefixes, rotary
# heads of 128 channels.
COMPILED = {
    "encoder": Case(ENCODER, 512, 512, True, num_heads=6, dtype="bfloat16", block=None),
    "decoder": Case(DECODER, 114, 114, True, num_heads=3, dtype="bfloat16", block=None),
    "cross": Case(ENCODER, 114, 512, False, num_heads=6, dtype="bfloat16", block=None),
    "prefix": Case(PREFIX, 2048, 2048, True, dtype="bfloat16", block=None),
    "rotary": Case(DECODER, 2048, 2048, False, 128, dtype="bfloat16", block=None, scale=0.0884),
    "window": Case(
        Mask(True, False, 512), 2048, 2048, False, 256, dtype="bfloat16", block=None, softcap=50
    ),
    "sparse": Case(*(ENCODER, 2048, 2048, True), dtype="bfloat16", pattern=Neighbours(32)),
}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_kernels_compile_for_tpus_without_one(topology):
    pytest.importorskip("libtpu")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "XLA_FLAGS": ""}
    done = started(__file__, topology, env=os.environ | environment | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [*COMPILED]


def whole_bias_of(case):
    return T5RelativePosition(case.mask == ENCODER)


def compile_for(topology):
    """Compiles forward and backward pass of COMPILED, and checks that they need no scratch."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    from trainer.model.device import Device

    device = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    memory_of_core = kernel_bytes(Device(device.device_kind))
    for name, case in COMPILED.items():
        if not buffers_of(case.length, memory_of_core):
            print(name, flush=True)  # computed without kernels there
            continue
        operands, rows, gradient = jax.eval_shape(partial(example, case, 0))
        length, source_length = case.length, case.source_length
        padded, source_padded = (-(-each // 128) * 128 for each in (length, source_length))
        logits = B * case.num_heads * padded * source_padded * 4

        layout = None
        if case.pattern:
            known = case.mask
            layout = tables_of(case.pattern, case.num_heads, case.head_dim, length, known)

        def run(operands, rows, gradient, case=case, layout=layout):
            more = {"block": None, "interpret": False, "vmem_bytes": memory_of_core}
            of = partial(attend, case, bias_of=whole_bias_of, layout=layout, **more)
            _, pull = jax.vjp(lambda *operands: of(*operands, *rows), *operands)
            return pull(gradient)

        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            (operands, rows, gradient),
        )
        program = jax.jit(run).lower(*abstract).compile()
        for lengths in (f"{length},{source_length}", f"{padded},{source_padded}"):
            assert f"[{B},{case.num_heads},{lengths}]" not in program.as_text()
        # A v5p keeps short operands in another order, and copies them.
        temporary = program.memory_analysis().temp_size_in_bytes
        assert temporary < max(logits, 2 << 20), (name, temporary)
        print(name, flush=True)


if __name__ == "__main__":
    compile_for(sys.argv[1])
