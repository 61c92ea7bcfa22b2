"""The floor of a step, against sums by hand."""

import pytest

from tests.support.runs import config_of
from trainer.annexes.planning.devices import CHIPS
from trainer.annexes.planning.floor import floor
from trainer.engine.cost import parameter_count

B, L, D, H, V = 8, 64, 256, 4, 512


def by_hand(k, depth, devices, bandwidth, peak):
    """A decoder of one layer: products of kernels, of attention, and the update's bytes."""
    config = model(k)
    kernels = 4 * D * H * k + 3 * D * 1024 + D * V  # gated units
    # Two products forward, and five backward: the logits again, and two gradients of each product.
    # Three sum over the channels of a head: the logits twice, the weights' gradient once.
    product = 2 * B * H * (L * L / 2) * k
    seconds = (6 * B * L * kernels + product * (4 + 3 * depth / k)) / peak
    return (seconds + 12 * parameter_count(config.model) / bandwidth) / devices


def model(k):
    sizes = {"emb_dim": D, "num_heads": H, "head_dim": k, "vocab_size": V, "mlp_dim": 1024}
    flags = [f"--model.{name}={size}" for name, size in sizes.items()]
    flags += ["--model.num_decoder_layers=1", "--model.tied_logits=false"]
    return config_of(*flags, f"--batch_size={B}", preset="lm_tiny")


@pytest.mark.parametrize(("k", "depth"), [(64, 128), (128, 128), (192, 256)])
def test_a_floor_is_products_and_the_bytes_of_the_update(k, depth):
    found = floor(model(k), (0, L), CHIPS["v5e"], 4, 197e12)
    assert found == pytest.approx(by_hand(k, depth, 4, 819e9, 197e12))


def test_a_wider_matrix_unit_leaves_more_of_itself_empty():
    found = floor(model(64), (0, L), CHIPS["v6e"], 1, 918e12)
    assert found == pytest.approx(by_hand(64, 256, 1, 1.6e12, 918e12))
