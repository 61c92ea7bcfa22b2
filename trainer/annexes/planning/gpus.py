"""NVIDIA GPUs (memory, links, price), hosts of them, and their compiler, which needs no GPU."""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from tasks.terminal.command_line import UserError
from trainer.annexes.planning.devices import PEAK, Calibration, Place, Rates
from trainer.engine.determinism import GPU_FLAG

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A model of GPUs; its hosts have 8, joined by NVSwitch.

    Attributes:
      kind: JAX's `device_kind`.
      memory: bytes that JAX may allocate.
      memory_bandwidth: HBM bytes per second.
      link: bytes per second that a GPU sends to the others of its host.
      network: bytes per second that a GPU sends to other hosts, through its own adapter.
      dollars: price per GPU-hour.
      facts: the compiler's description of the GPU.
      rates: what programs reach of these figures.
    """

    kind: str
    memory: int
    memory_bandwidth: float
    link: float
    network: float
    dollars: float
    facts: Mapping[str, Any]
    rates: Rates = PEAK

    # Where times come from, the compiler's help, and the unit of the price.
    basis = "a roofline of the compiled kernels"
    unit = "GPU"
    calibration = Calibration(0.92, 1.07, 6)
    # Tensor cores multiply blocks that every head fills.
    matrix_unit = 16
    # Seconds from the end of a kernel to the start of the next. An assumption, not a measurement:
    # about what kernels of one CUDA graph need, in which XLA launches them.
    launch = 2e-6
    # Source and date of the prices below.
    prices = (
        "cloud.google.com/compute/gpus-pricing, a3-highgpu-8g and a2-ultragpu-8g, on demand, as of "
        "June 2025; others ask far less"
    )

    def seconds_of_collective(self, sent: int, group: list[Place], shape: tuple[int, ...]) -> float:
        """Returns the seconds of a collective at the bandwidth of the slowest part of its ring.

        What leaves a host is divided among the adapters of the group's GPUs there. `sent` is bytes
        per device.
        """
        hosts = {place.coordinates[0] for place in group}
        inside = sent / self.link if len(group) > len(hosts) else 0.0
        outside = sent / self.network / (len(group) // len(hosts)) if len(hosts) > 1 else 0.0
        return max(inside, outside)


def _facts(**facts: Any) -> Mapping[str, Any]:
    return MappingProxyType(
        {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "threads_per_core_limit": 2048,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        | facts
    )


# Usable memory: JAX takes 75% of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; CUDA
# and NCCL need a few GB.
_SHARE = 0.92
# Sources: openxla/xla, xla/backends/gpu/target_config/specs (h100_sxm.txtpb, a100_sxm_80.txtpb);
# links: jax-ml.github.io/scaling-book, chapter 12: 370 GB/s of H100's 450 are reached, and the same
# share of A100's 300 is assumed; network: the data sheets of DGX H100 and A100, 400 and 200 Gb/s.
#
# Rates are fitted to whole steps that others measured (benchmarks/calibration.toml). Alone, parts
# reach more: products 0.86 of A100's and 0.80 of H100's peak (stas00/ml-engineering, MAMF),
# attention 0.5 to 0.73 and 0.35 (Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608).
_A100 = Rates(products=0.72, memory=0.7, kernels=0.5)
_H100 = Rates(products=0.55, memory=0.6, kernels=0.35)
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "h100": Gpu(
            *("NVIDIA H100 80GB HBM3", int(80 * _GIB * _SHARE), 3.352e12, 370e9, 50e9, 11.06),
            _facts(
                core_count=132,
                fpus_per_core=128,
                shared_memory_per_core=233472,
                shared_memory_per_block_optin=232448,
                memory_bandwidth=3352320000000,
                l2_cache_size=52428800,
                clock_rate_ghz=1.98,
                device_memory_size=84942979072,
                cuda_compute_capability={"major": 9},
            ),
            _H100,
        ),
        "a100": Gpu(
            *("NVIDIA A100-SXM4-80GB", int(80 * _GIB * _SHARE), 2.039e12, 247e9, 25e9, 5.07),
            _facts(
                core_count=108,
                fpus_per_core=64,
                shared_memory_per_core=167936,
                shared_memory_per_block_optin=166912,
                memory_bandwidth=2039040000000,
                l2_cache_size=41943040,
                clock_rate_ghz=1.41,
                device_memory_size=85100068864,
                cuda_compute_capability={"major": 8},
            ),
            _A100,
        ),
    }
)
_TOPOLOGY = re.compile(r"(\w+):(?:(\d+)x)?(\d+)")
_MOST = 8
# Without a GPU nothing can be timed, so the compiler must not choose by trying.
_XLA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def gpu_of(device_kind: str) -> Gpu | None:
    """Returns the GPU with this `device_kind`; None if it is not in the table."""
    return next((gpu for gpu in GPUS.values() if gpu.kind == device_kind), None)


@dataclasses.dataclass(frozen=True)
class GpuHosts:
    """Hosts with GPUs, such as "h100:8" for one host and "h100:2x8" for two."""

    name: str
    model: str
    hosts: int
    per_host: int

    @classmethod
    def named(cls, name: str) -> Self | None:
        """Parses the name; None if it names no GPU of GPUS. Raises UserError for a wrong size."""
        found = _TOPOLOGY.fullmatch(name)
        if not found or found[1] not in GPUS:
            return None
        hosts, per_host = int(found[2] or 1), int(found[3])
        if not hosts or not 0 < per_host <= _MOST or (hosts > 1 and per_host < _MOST):
            raise UserError(
                f"--topology={name}: one host has 1 to {_MOST} GPUs ({found[1]}:{_MOST}), several "
                f"hosts {_MOST} each ({found[1]}:4x{_MOST} for four)"
            )
        return cls(name, found[1], hosts, per_host)

    @property
    def chip(self) -> Gpu:
        """The GPU."""
        return GPUS[self.model]

    def devices(self) -> list[Any]:
        """Returns devices for which programs can be compiled but not run."""
        from jax.experimental import topologies

        try:
            description = topologies.get_topology_desc(
                self.name,
                "cuda",
                topology=f"1x{self.hosts}x{self.per_host}",
                target_config=_target_config(self.chip),
            )
        except Exception as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"--topology={self.name}: the GPU's compiler says: {first}") from error
        return list(description.devices)

    def prepare_compiler(self, deterministic: bool) -> None:
        """Sets up the GPU's compiler for machines without a GPU; call it before JAX starts."""
        # The search for a module in a package that is missing raises.
        found = importlib.util.find_spec("jax_plugins")
        if found is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
            raise UserError(
                f"--topology={self.name} needs the GPU's compiler, jax-cuda13-plugin, which is not "
                "installed: pip install --constraint constraints.txt '.[gpu-plan]'; without "
                "--topology the plan is for the devices of this machine"
            )
        os.environ["JAX_PLATFORMS"] = "cpu"
        own = f"{_XLA_FLAGS} {GPU_FLAG}={str(deterministic).lower()}"
        os.environ["XLA_FLAGS"] = f"{own} {os.environ.get('XLA_FLAGS', '')}".strip()
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _target_config(gpu: Gpu) -> str:
    """Returns XLA's GpuTargetConfigProto as text.

    Source: openxla/xla, xla/stream_executor/device_description.proto.
    """
    described = " ".join(f"{name} {_value(value)}" for name, value in gpu.facts.items())
    return (
        f'gpu_device_info {{ {described} }} platform_name: "CUDA" '
        "dnn_version_info { major: 9 minor: 8 } runtime_version { major: 13 minor: 0 patch: 0 } "
        f'device_description_str: "{gpu.kind}"'
    )


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + " ".join(f"{name}: {each}" for name, each in value.items()) + " }"
    return f": {value}"
