"""Peak performance and memory of accelerators, reuse of memory, and out-of-memory errors."""

import contextlib
import ctypes
import re
import resource
import sys
from collections.abc import Iterator

from tasks.terminal.command_line import UserError

# Patterns of JAX's `device_kind` -> dense bfloat16 operations per second of one device, with
# float32 accumulation; the first match counts. A v2 or v3 device is one of a chip's two cores.
# Sources: NVIDIA's data sheets for V100, A100, L4, L40S, H100, H200 and B200 (half the figures
# with sparsity); cloud.google.com/tpu/docs, system architecture.
_PEAK_FLOPS = (
    (r"TPU v2", 23e12),
    (r"TPU v3", 61.5e12),
    (r"TPU v4 lite", 137e12),
    (r"TPU v4", 275e12),
    (r"TPU v5 ?(lite|e)", 197e12),
    (r"TPU v5", 459e12),
    (r"TPU v6 ?(lite|e)", 918e12),
    (r"V100", 125e12),
    (r"A100", 312e12),
    (r"\bL4\b", 121e12),
    (r"\bL40S\b", 362e12),
    (r"H100 PCIe", 756e12),
    (r"H100 NVL", 835e12),
    (r"H100|H200|GH200", 989e12),
    (r"\bB200\b", 2250e12),
)


def peak_flops(device_kind: str) -> float | None:
    """Returns a device's peak dense bfloat16 operations per second, or None if unknown."""
    return next((flops for pattern, flops in _PEAK_FLOPS if re.search(pattern, device_kind)), None)


def peak_memory() -> dict[str, int]:
    """Returns peak bytes: `host_memory_bytes`, and `device_memory_bytes` (fullest) if counted."""
    import jax

    counted = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in counted if "peak_bytes_in_use" in stats]
    # Linux counts kilobytes, macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    host = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {**({"device_memory_bytes": max(peaks)} if peaks else {}), "host_memory_bytes": host}


# Parameters of mallopt. Source: glibc, `malloc/malloc.h`.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_INT_MAX = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes malloc keep what it frees, if JAX computes on a CPU and the C library is glibc.

    glibc maps each large buffer and unmaps it when it is freed, so the system clears the pages of
    all buffers at every update, which takes up to a fifth of it.
    """
    import jax

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and jax.default_backend() == "cpu":
        # Only the first arena can grow without mapping.
        for parameter, value in ((_MMAP_MAX, 0), (_ARENA_MAX, 1), (_TRIM_THRESHOLD, _INT_MAX)):
            mallopt(parameter, value)


# JAX's errors share one class; on a CPU, a failed allocation is INTERNAL.
_NO_MEMORY = re.compile("RESOURCE_EXHAUSTED|Out of memory")


@contextlib.contextmanager
def enough_memory(advice: str) -> Iterator[None]:
    """Turns an allocation error in the block into a one-line UserError with `advice`."""
    try:
        yield
    except Exception as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(text):
            raise
        size = re.search(r"(?:allocat\w*|Unable to allocate) ([\d.]+ ?\w+)", text)
        wanted = f" ({size[1]} more were wanted)" if size else ""
        raise UserError(f"out of memory{wanted}: {advice}") from error
