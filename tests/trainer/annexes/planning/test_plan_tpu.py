"""Plans for TPU slices that are not there: each family compiles, a search, the cycles of a kernel.

They need libtpu, the extra `tpu`, and take minutes each.
"""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support.processes import started
from trainer.model.attention_cores import CORES

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu, the extra tpu"
    ),
]
ENCODER, DECODER = ("num_encoder_layers",), ("num_decoder_layers",)
BOTH = (*ENCODER, *DECODER)
SIDES = ("--lengths.inputs=512", "--lengths.targets=114")
ROWS = ("--lengths.inputs=0", "--lengths.targets=256")
# Preset, stacks, flags, whether a scan can run its layers.
FAMILIES = (
    ("t5_1_0_base", BOTH, SIDES, True),
    ("t5_1_1_base", BOTH, SIDES, True),
    ("mt5_base", BOTH, SIDES, True),
    ("t5_1_1_base_primer_ez", BOTH, SIDES, True),
    ("lm_base", DECODER, ROWS, True),
    ("llama_1b", DECODER, ROWS, True),
    ("bert_base", ENCODER, ("--model.vocab_size=30592", "--lengths.inputs=512"), True),
    ("medium_primer", DECODER, ROWS, True),
    ("switch_primer", DECODER, (*ROWS, "--model.feed_forward=switch:experts=32,every=1"), False),
)


def plan(*flags, topology="v5e:4x4"):
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
    }
    return started(
        "-m", "trainer.annexes.planning.plan", f"--topology={topology}", *flags, env=environment
    )


def layers(stacks, scan):
    """Returns flags: all layers of a stack are alike, so one is enough, or two in a scan.

    The evaluation step is compiled without a scan only.
    """
    number, scanned = (2, "true") if scan else (1, "false")
    flags = [f"--model.{name}={number}" for name in stacks]
    flags.append(f"--model.scan_layers={scanned}")
    return (*flags, "--evaluation.every_steps=0") if scan else tuple(flags)


CASES = [
    pytest.param(preset, (*flags, *layers(stacks, scan)), id=f"{preset}-{scan}")
    for preset, stacks, flags, scannable in FAMILIES
    for scan in ((False, True) if scannable else (False,))
]


@pytest.mark.parametrize(("preset", "flags"), CASES)
def test_every_family_compiles_for_a_slice_of_several_hosts(preset, flags):
    mesh = ("--mesh.data=4", "--mesh.fsdp=2", "--mesh.tensor=2")
    result = plan(
        f"--preset={preset}", *flags, *mesh, "--batch_size=64", "--model.dtype=bfloat16", "--json"
    )
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["fits"]
    assert values["hosts"] == 4
    assert values["host_rows"] == 16
    seconds = values["train"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(values["step_seconds"])
    assert min(seconds["attention"], seconds["feed-forward"], seconds["optimizer"]) > 0
    assert sum(values["train"]["bytes"].values()) <= values["needed_bytes"]
    assert 0 < values["mfu"] < 1
    kernels = values["train"]["kernels"]
    assert all(each["cycles"] for each in kernels)
    # BERT drops weights of its attention, which kernels do not.
    if "pallas" in CORES and not preset.startswith("bert"):
        assert {each["name"] for each in kernels} == {"attention_forward", "attention_backward"}


@pytest.mark.parametrize(
    ("topology", "hosts"), [("v4:2x2x2", 2), ("v5p:2x2x2", 2), ("v6e:2x4", 2), ("2xv5e:2x2", 2)]
)
def test_every_generation_and_several_slices(topology, hosts):
    flags = ("--preset=t5_1_1_mini", "--lengths.inputs=128", "--lengths.targets=32")
    scan = ("--model.scan_layers=true", "--model.dtype=bfloat16")
    result = plan(*flags, *scan, "--batch_size=64", "--json", topology=topology)
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert values["hosts"] == hosts
    assert values["devices"] == 8
    between = [kind for kind in values["train"]["collectives"] if "between slices" in kind]
    assert bool(between) == topology.startswith("2x")


def test_a_run_that_does_not_fit_is_refused_with_one_that_does():
    flags = ("--preset=lm_base", "--model.num_decoder_layers=2", "--lengths.inputs=0")
    large = ("--lengths.targets=2048", "--batch_size=512", "--model.dtype=bfloat16")
    result = plan(*flags, *large, "--evaluation.every_steps=0", topology="v5e:2x2")
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert "the run does not fit v5e:2x2" in last
    assert "what fits" in last
    assert "--m" in last.rpartition("a device: ")[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_compilation_at_once(number, tmp_path):
    command = [
        sys.executable, "-m", "trainer.annexes.planning.plan", "--topology=v5e:2x2",
        "--preset=t5_1_1_base",
    ]  # fmt: skip
    flags = [*SIDES, "--batch_size=64", "--model.dtype=bfloat16"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*command, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    with process:
        until = time.monotonic() + 120
        while not any(tmp_path.glob("schedules_*/*")) and time.monotonic() < until:
            time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(timeout=20) == 128 + number
        assert process.stderr is not None
        assert process.stderr.read().splitlines()[-1] == "stopped"
    assert not any(tmp_path.glob("schedules_*"))


KERNEL = """
import sys
from trainer.annexes.planning import devices
from trainer.annexes.planning.kernels import Schedules
devices.prepare_compiler()
schedules = Schedules()
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl

def kernel(a, b, out):
    def step(number, total):
        return total + jnp.dot(a[...], b[...] * number, preferred_element_type=jnp.float32)
    out[...] = jax.lax.fori_loop(0, 7, step, jnp.zeros((256, 256), jnp.float32))

def run(a, b):
    return pl.pallas_call(
        kernel, grid=(int(sys.argv[1]),), name="products",
        out_shape=jax.ShapeDtypeStruct(a.shape, jnp.float32),
        in_specs=[pl.BlockSpec((256, 256), lambda i: (i, 0)),
                  pl.BlockSpec((256, 256), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((256, 256), lambda i: (i, 0)),
    )(a, b)

on = jax.sharding.SingleDeviceSharding(devices.Topology.named("v5e:2x2").devices()[0])
rows = 256 * int(sys.argv[1])
a, b = (jax.ShapeDtypeStruct((n, 256), jnp.float32, sharding=on) for n in (rows, 256))
from trainer.annexes.planning import hlo
from trainer.annexes.planning.kernels import kernel_of, kernels
traced = jax.jit(run).trace(a, b)
module = hlo.parse(traced.lower().compile().as_text())
(call,) = [each for each in module.computations[module.entry] if each.target]
print(kernel_of(call, kernels(traced.jaxpr.jaxpr)).cycles(schedules.read(module)[call.name]))
"""


def test_cycles_of_a_kernel_grow_with_its_grid(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(KERNEL)

    def cycles(grid):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        result = started(script, str(grid), env=environment)
        return int(result.stdout)

    # Seven products of 256 x 256 x 256 take more than 7 x 256 / 4 bundles of four MXUs.
    assert cycles(64) > 64 * 7 * 64
    assert cycles(128) == pytest.approx(2 * cycles(64), rel=0.05)
