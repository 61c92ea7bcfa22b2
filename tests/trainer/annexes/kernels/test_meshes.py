"""Kernels on a mesh run on each device's rows and heads, and equal einsums on one device.

As a program, `test_meshes.py` prints the results of runs on all devices as JSON.
"""

import contextlib
import functools
import json

import numpy as np
import pytest

from tests.support import eight_devices
from tests.trainer.engine.test_sharding import CUBE, program_of, run
from trainer.annexes.kernels import fused_core
from trainer.annexes.kernels.triton_attention import triton_attention
from trainer.model import attention_call
from trainer.model.device import Device

FUSED = ["--model.head_dim=64", "--model.attention=pallas", *CUBE]


@contextlib.contextmanager
def pretended_gpu():
    """Attention takes the device for a GPU, whose kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_call, fused_core):
            patch.setattr(module, "tracing_device", lambda: Device("NVIDIA H100 80GB HBM3"))
        interpreted = functools.partial(triton_attention, interpret=True)
        patch.setattr(fused_core, "triton_attention", interpreted)
        yield


def main():
    results = {"tpu": run(program_of(*FUSED))}
    with pretended_gpu():
        results["gpu"] = run(program_of(*FUSED, "--model.dropout_rate=0"))
    print(json.dumps(results))


@pytest.fixture(scope="module")
def mesh():
    """The results on eight devices."""
    return eight_devices.run(__file__)


@pytest.mark.processes
def test_fused_attention_on_a_mesh_equals_einsums_on_one_device(mesh):
    alone = run(program_of("--model.head_dim=64"))
    np.testing.assert_allclose(mesh["tpu"]["losses"], alone["losses"], atol=1e-5)


@pytest.mark.processes
def test_attention_of_gpus_on_a_mesh_equals_einsums_on_one_device(mesh):
    alone = run(program_of("--model.head_dim=64", "--model.dropout_rate=0"))
    np.testing.assert_allclose(mesh["gpu"]["losses"], alone["losses"], atol=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("preset", "flags"), [("t5_1_1_tiny", ()), ("llama_tiny", ("--model.num_kv_heads=2",))]
)
def test_attention_of_gpus_equals_einsums(preset, flags):
    # With dropout of weights, queries, keys and values are taken apart.
    flags = ("--model.head_dim=16", "--model.dropout_rate=0", *flags)
    alone = run(program_of(*flags, preset=preset))
    with pretended_gpu():
        fused = run(program_of(*flags, "--model.attention=pallas", preset=preset))
    np.testing.assert_allclose(fused["losses"], alone["losses"], atol=1e-5)
    assert fused["final"] != alone["final"]


if __name__ == "__main__":
    main()
