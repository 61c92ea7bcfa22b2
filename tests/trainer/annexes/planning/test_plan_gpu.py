"""Plans for GPUs that are not there. They need XLA's compiler for GPUs, the extra gpu-plan."""

import importlib.util
import json
import os

import pytest

from tests.support.processes import started

try:
    found = importlib.util.find_spec("jax_plugins.xla_cuda13")
except ModuleNotFoundError:
    found = None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found is None, reason="needs jax-cuda13-plugin, the extra gpu-plan"),
]
SMALL = (
    *("--preset=t5_1_1_small", "--lengths.inputs=128", "--lengths.targets=64", "--batch_size=64"),
    *("--model.num_encoder_layers=1", "--model.num_decoder_layers=1", "--model.dropout_rate=0"),
    *("--model.dtype=bfloat16", "--evaluation.every_steps=0"),
)


def plan(*flags):
    kept = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return started("-m", "trainer.annexes.planning.plan", *SMALL, *flags, env=kept)


ATTENTION = {f"attention_{name}" for name in ("forward", "query", "key", "bias")}


@pytest.mark.parametrize(
    ("topology", "hosts", "mesh", "kernels"),
    [
        ("h100:8", 1, ("--mesh.fsdp=2",), ATTENTION | {"logit_statistics"}),
        # Rows of logits are divided over "tensor".
        ("a100:2x8", 2, ("--mesh.fsdp=2", "--mesh.tensor=2"), ATTENTION),
    ],
)
def test_a_step_compiles_with_the_kernels_and_without(topology, hosts, mesh, kernels):
    pytest.importorskip("trainer.annexes.kernels.cores")
    fused, written_out = (
        json.loads(
            plan(*mesh, f"--topology={topology}", "--json", f"--model.attention={name}").stdout
        )
        for name in ("auto", "einsum")
    )
    assert fused["fits"]
    assert fused["hosts"] == hosts
    assert {each["name"] for each in fused["train"]["kernels"]} == kernels
    for part in ("attention", "feed-forward", "logits and loss", "collectives", "launches"):
        assert fused["train"]["seconds"][part] > 0, part
    attention = [each["train"]["seconds"]["attention"] for each in (fused, written_out)]
    assert attention[0] < attention[1]
    assert fused["needed_bytes"] < written_out["needed_bytes"]
    assert fused["train"]["collectives"]["all-reduce"]["bytes"] > 0


def test_the_page_has_no_columns_of_what_the_compiler_does_not_estimate():
    page = plan("--topology=h100:1")
    assert page.returncode == 0, page.stderr
    assert "XLA's estimate" not in page.stdout
    assert "cycles" not in page.stdout
    assert "a roofline of the compiled kernels" in page.stdout
    assert "a GPU and hour" in page.stdout
