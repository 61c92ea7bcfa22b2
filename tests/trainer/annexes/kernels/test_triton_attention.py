"""Fused attention for GPUs equals attention with its logits written out, in every gradient."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.trainer.annexes.kernels.test_fused_attention import (
    BOTH_WAYS,
    DECODER,
    ENCODER,
    LOCAL,
    PREFIX,
    Case,
    assert_written_out,
    bias_of,
    compiled,
    example,
    joining,
)
from trainer.annexes.kernels import triton_attention
from trainer.model.positions import RelativeBias

pytestmark = pytest.mark.processes

# Lengths that fill blocks and that do not, shorter and longer than the other side.
CASES = {
    "encoder": Case(ENCODER, 40, 40, True, head_dim=16),
    "encoder, one block": Case(ENCODER, 13, 13, True, head_dim=32, num_heads=1, block=None),
    "encoder, other lengths": Case(ENCODER, 20, 50, True, head_dim=16, scale=0.25),
    "decoder": Case(DECODER, 50, 50, True, head_dim=16, num_heads=4, shared=2),
    "decoder, rotary": Case(DECODER, 32, 32, False, head_dim=64, num_heads=2, shared=2, scale=0.1),
    "decoder, wide": Case(DECODER, 72, 72, True, head_dim=16, block=None),
    "prefix": Case(PREFIX, 40, 40, True, head_dim=32, dtype="bfloat16"),
    "cross": Case(ENCODER, 14, 70, False, head_dim=128, num_heads=1, block=None),
    "cross, longer": Case(ENCODER, 40, 20, False, head_dim=64, num_heads=1, dtype="bfloat16"),
    "window": Case(LOCAL, 76, 76, True, head_dim=16, num_heads=4, shared=2, softcap=1.5),
    "window of a prefix": Case(LOCAL._replace(prefix=True), 60, 60, True, head_dim=16),
    "window of an encoder": Case(BOTH_WAYS, 76, 76, True, head_dim=16, num_heads=1, softcap=0.5),
    "window, wide": Case(LOCAL, 140, 140, False, 256, num_heads=1, dtype="bfloat16", block=None),
    "cap": Case(DECODER, 40, 40, True, head_dim=32, scale=0.125, softcap=2.0),
}


def attend(case, q, k, v, table, query, key, bias_of=bias_of, **more):
    return triton_attention.triton_attention(
        *(q, k, v, query, key, case.head_dim, case.mask),
        relative=RelativeBias(table, bias_of(case)) if case.biased else None,
        scale=case.scale,
        **{"block": case.block, "interpret": True, "softcap": case.softcap} | more,
    )


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
def test_outputs_and_gradients_are_those_of_logits_written_out(name, seed):
    case = CASES[name]
    operands, rows, gradient = example(case, seed)
    actual = compiled(case, attend)(operands, rows, gradient)
    assert_written_out(case, actual, operands, rows, gradient)


@pytest.mark.parametrize("name", ["encoder", "prefix", "decoder", "cross"])
def test_kernels_read_what_one_product_projects(name):
    """Queries, keys and values in one array, or keys and values."""
    case = CASES[name]
    operands, rows, gradient = example(case, 1)
    actual = compiled(case, joining(attend, 1))(operands, rows, gradient)
    assert_written_out(case, actual, operands, rows, gradient)


def test_parts_of_the_batch_add_to_the_bias_gradient(monkeypatch):
    case = CASES["encoder"]
    operands, rows, gradient = example(case, 0)
    one, two = (  # a program for all rows, or one for each
        monkeypatch.setattr(triton_attention, "_PROGRAMS", programs)
        or compiled(case._replace(unrolled=programs), attend)(operands, rows, gradient)[1][3]
        for programs in (1, 1 << 20)
    )
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    assert np.abs(one).max() > 0.1
