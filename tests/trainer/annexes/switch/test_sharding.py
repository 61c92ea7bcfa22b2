"""Experts on a mesh equal those of one device; as a program, it prints results of all devices."""

import json

import numpy as np
import pytest

from tests.support import eight_devices
from tests.trainer.engine.test_sharding import B, batch_of, program_of, run, text_of

EXPERTS = "--model.feed_forward=switch:experts=4,every=1"
# Experts are divided over the axis of the rows, their hidden units over "tensor".
MESH = ["--mesh.data=4", "--mesh.tensor=2"]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def eight():
    return eight_devices.run(__file__)


def test_divided_experts_equal_one_device(eight):
    one, eight = run(program_of(EXPERTS)), eight["experts"]
    np.testing.assert_allclose(eight["losses"], one["losses"], atol=1e-5)
    dropped, routed = one["metrics"]["dropped_tokens"]
    # All tokens of all rows, at each of five steps.
    assert routed == 5 * sum(np.count_nonzero(row) for row in batch_of(0)["decoder_loss_weights"])
    assert 0 < dropped < routed
    assert eight["metrics"]["dropped_tokens"] == [dropped, routed]
    inside = "decoder/layers_0/mlp/experts"
    assert eight["params"][f"{inside}/wi_0/kernel"] == ["data", "fsdp", "tensor"]
    assert eight["params"][f"{inside}/wo/kernel"] == ["data", "tensor", "fsdp"]
    assert eight["opt_state"][f"0/v/{inside}/wo/kernel"] == ["data", "tensor", "fsdp"]
    assert eight["held"] < 0.5 * one["held"]


def test_tokens_move_to_experts_not_experts_to_tokens(eight):
    # To the experts and back, in both passes; nothing is gathered on every device.
    assert eight["program"].count(" all-to-all(") == 4
    assert " all-gather(" not in eight["program"]


if __name__ == "__main__":
    # Tokens are larger than experts here, so that the compiler would prefer to move the experts.
    rows = {name: np.ones((B, 512), np.int32) for name in batch_of(0)}
    many = EXPERTS.replace("experts=4", "experts=8")
    found = {"experts": run(program_of(EXPERTS, *MESH)), "program": text_of(program_of(many), rows)}
    print(json.dumps(found))
