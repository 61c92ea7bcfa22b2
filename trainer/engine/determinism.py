"""Bitwise reproducibility: XLA's flag for GPUs, and the guarantee on each platform."""

import contextlib
import os
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from tasks.terminal.command_line import UserError

# Excludes kernels whose results vary between runs (scatters with atomics, some GEMMs and fused
# attentions) and chooses kernels without timing them, since the fastest may differ next time.
# Source: openxla/xla, `docs/determinism.md` and `GetConfigAssignerOptions`.
GPU_FLAG = "--xla_gpu_deterministic_ops"
# Both make a program deterministic. If the user's XLA_FLAGS contain either, nothing is added.
_GPU_FLAGS = (GPU_FLAG, "--xla_gpu_exclude_nondeterministic_ops")
# GPU platforms in JAX_PLATFORMS, and substrings of the names of JAX's GPU plugins.
_GPUS = ("gpu", "cuda", "rocm")


def set_flags(deterministic: bool) -> None:
    """Sets XLA_FLAGS for a run.

    Raises UserError if they change but JAX has already found GPUs, which then ignore them.
    """
    flags = xla_flags(os.environ, _plugins(), deterministic)
    if flags == os.environ.get("XLA_FLAGS", ""):
        return
    if _uses_gpus():
        raise UserError(
            "--deterministic has no effect any more, as this process has already used its GPUs: "
            f"set XLA_FLAGS={GPU_FLAG}=true before it does, or deterministic to false"
        )
    os.environ["XLA_FLAGS"] = flags


def _uses_gpus() -> bool:
    """Returns whether JAX has looked for devices and found GPUs."""
    if "jax" not in sys.modules:
        return False
    import jax
    from jax._src import xla_bridge  # no public name tells without looking for devices

    return xla_bridge.backends_are_initialized() and jax.default_backend() == "gpu"


def xla_flags(environment: Mapping[str, str], plugins: Iterable[str], deterministic: bool) -> str:
    """Returns XLA_FLAGS, with GPU_FLAG if the run is deterministic and may find GPUs."""
    flags = environment.get("XLA_FLAGS", "")
    platforms = environment.get("JAX_PLATFORMS", "")
    possible = any(gpu in name for name in plugins for gpu in _GPUS)
    allowed = not platforms or any(gpu in platforms for gpu in _GPUS)
    if not (deterministic and possible and allowed) or any(name in flags for name in _GPU_FLAGS):
        return flags
    return f"{flags} {GPU_FLAG}=true".lstrip()


def promise() -> str:
    """Returns how closely a resumed run repeats an uninterrupted one, for the startup line."""
    return said(hardware())


def said(found: Mapping[str, Any]) -> str:
    """Returns the text of `promise` for a result of `hardware`."""
    if found["platform"] == "cpu":
        return f"with identical results on {found['cores']} core(s) of the same kind of CPU"
    if found["platform"] == "gpu" and not found["deterministic"]:
        return "with results that differ by rounding: GPU kernels are not deterministic"
    return f"with identical results on {found['devices']} device(s) of the same kind"


def hardware() -> dict[str, Any]:
    """Returns the hardware facts on which a run's exact results depend."""
    import jax

    device = jax.devices()[0]
    found: dict[str, Any] = {
        "platform": device.platform,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
    }
    if device.platform == "cpu":
        return {**found, "cpu": _cpu(), "cores": cores()}
    found["device_kind"] = device.device_kind
    if device.platform == "gpu":
        found["deterministic"] = are_deterministic(os.environ.get("XLA_FLAGS", ""))
    return found


def cores() -> int:
    """Returns the number of CPU cores among which XLA divides its work.

    Source: openxla/xla, `DefaultThreadPoolSize` and `MaxParallelism`.
    """
    if os.environ.get("NPROC", "").isdigit():
        return int(os.environ["NPROC"])
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def are_deterministic(flags: str) -> bool:
    """Returns whether these XLA_FLAGS make programs on GPUs deterministic."""
    values = dict(flag.partition("=")[::2] for flag in flags.split())
    return any(values.get(name, "false").lower() in ("", "true", "1") for name in _GPU_FLAGS)


def _plugins() -> list[str]:
    found = [entry.value for entry in entry_points(group="jax_plugins")]
    try:
        import jax_plugins
    except ImportError:
        return found
    return [*found, *(module.name for module in pkgutil.iter_modules(jax_plugins.__path__))]


def _cpu() -> str:
    import platform

    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
