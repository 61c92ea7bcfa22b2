"""The kernels compute attention where they can, and "auto" takes them where they are faster."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.model.conftest import tiny_config
from trainer.annexes.kernels.fused_core import rotate_joined
from trainer.model.positions import rotate


@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "attention"),
    [
        ("TPU v5 lite", "bfloat16", 64, "pallas"),
        ("TPU v5 lite", "bfloat16", 80, "einsum"),
        ("TPU v6 lite", "float32", 64, "einsum"),
        ("TPU v3", "bfloat16", 64, "einsum"),
        ("cpu", "bfloat16", 64, "einsum"),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 64, "pallas"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 128, "pallas"),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 256, "pallas"),
        ("NVIDIA H100 80GB HBM3", "float32", 64, "einsum"),
        ("NVIDIA GeForce RTX 2080 Ti", "bfloat16", 64, "einsum"),
        ("Tesla V100-SXM2-32GB", "bfloat16", 64, "einsum"),
        ("AMD Instinct MI250X", "bfloat16", 64, "einsum"),
    ],
)
def test_auto_is_the_fused_kernel_where_it_applies(make_config, kind, dtype, head_dim, attention):
    def chosen(**changes):
        sizes = {"dtype": dtype, "head_dim": head_dim}
        return make_config("t5_1_1", **sizes, **changes).attention_on(kind)

    assert chosen() == attention
    assert chosen(attention="dot_product") == "dot_product"


def test_auto_leaves_out_what_kernels_cannot_compute(make_config):
    def chosen(family, **changes):
        config = make_config(family, dtype="bfloat16", head_dim=64, **changes)
        return config.attention_on("TPU v5 lite")

    assert chosen("t5_1_1", dropout_rate=0.1) == "pallas"
    assert chosen("t5_1_1", attention="einsum") == "einsum"
    assert (chosen("bert"), chosen("bert", dropout_rate=0.1)) == ("pallas", "einsum")


def test_kernels_drop_the_weights_of_t5():
    tiny_config("t5_1_1", attention="pallas", dropout_rate=0.1)


@pytest.mark.parametrize("channels", [8, 4])
def test_joined_heads_rotate_like_separate_ones(channels):
    random = np.random.default_rng(0)
    x_BLHK = jnp.asarray(random.normal(size=(2, 5, 3, 8)), jnp.float32)
    angle_BLC = jnp.asarray(random.normal(size=(2, 5, channels // 2)), jnp.float32)
    joined_BLJ = rotate_joined(x_BLHK.reshape(2, 5, -1), angle_BLC, 8)
    np.testing.assert_allclose(joined_BLJ.reshape(x_BLHK.shape), rotate(x_BLHK, angle_BLC), 1e-6)
