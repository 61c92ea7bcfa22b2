"""The kernels' statistics of logits equal numpy's, whatever the lengths."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.annexes.kernels import logit_kernel, triton_logits

MEMORY = 1 << 20


def on_tpu(logits, targets):
    rows = logit_kernel.rows_of_block(*logits.shape[1:], MEMORY)
    return logit_kernel.statistics(logits, targets, rows, MEMORY, interpret=True)


def on_gpu(logits, targets):
    return triton_logits.triton_statistics(logits, targets, interpret=True)


@pytest.mark.parametrize("statistics", [on_tpu, on_gpu])
@settings(max_examples=8, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    vocab_size=st.sampled_from([1, 40, 128, 1000, 1024, 1153, 2100]),
    shift=st.sampled_from([-1e4, 0.0, 1e4]),
    seed=st.integers(0, 2**32 - 1),
)
def test_statistics_are_those_of_numpy(statistics, batch, length, vocab_size, shift, seed):
    random = np.random.default_rng(seed)
    logits = (random.normal(size=(batch, length, vocab_size)) * 9 + shift).astype(np.float32)
    targets = random.integers(0, vocab_size, (batch, length))
    found = statistics(jnp.asarray(logits), jnp.asarray(targets))

    exact, at = logits.astype(np.float64), targets[..., None]
    target = np.take_along_axis(exact, at, -1)
    others = exact.copy()
    np.put_along_axis(others, at, -np.inf, -1)
    maximum = exact.max(-1, keepdims=True)
    log_z = np.log(np.exp(exact - maximum).sum(-1)) + maximum[..., 0]
    np.testing.assert_allclose(found.log_z, log_z, rtol=1e-6, atol=1e-5)
    np.testing.assert_array_equal(found.target, target[..., 0])
    np.testing.assert_array_equal(found.rival, others.max(-1))
    np.testing.assert_allclose(found.total, exact.sum(-1), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize(
    ("length", "vocab_size", "rows"),
    [(114, 32_128, 64), (512, 32_128, 64), (5, 32_128, 8), (114, 250_112, 16), (114, 10**7, 0)],
)
def test_blocks_fit_the_memory(length, vocab_size, rows):
    assert logit_kernel.rows_of_block(length, vocab_size, 64 << 20) == rows
