"""The kernels as attention cores: what they compute, and where they are faster. No JAX."""

from __future__ import annotations

from dataclasses import replace

from trainer.annexes.kernels.hardware import (
    GPU_HEADS,
    buffers_of,
    fills_lanes,
    fills_tiles,
    is_faster,
    kernel_bytes,
)
from trainer.model.attention_cores import Core, Reason, Request
from trainer.model.device import LANES, Device

_OTHERS = Reason("attention", "another one")


def supports(request: Request) -> Reason | None:
    """Returns why the kernels do not compute a request; None if they do."""
    on_gpu = request.device is not None and request.device.is_gpu
    pattern = request.pattern
    if request.cached or request.added or request.watched or request.initial:
        return _OTHERS
    if pattern is not None and (on_gpu or not _tiles(request, pattern.block)):
        return Reason("attention_pattern", "of blocks of 8, 16, 32, 64 or a multiple of 128")
    # If all queries drop the same weights, values are dropped instead, outside the kernels.
    if request.drops_by_query:
        return Reason("dropout_rate", "0", "which cannot drop weights")
    if request.weights != "softmax":
        return Reason("attention_weights", "'softmax'")
    if not request.masked:
        return Reason("attention_window", "another one")
    if not request.by_distance:
        return Reason("position", "another one")
    if not fills_lanes(request.head_dim) or (on_gpu and request.head_dim not in GPU_HEADS):
        return Reason("head_dim", "a divisor or multiple of 128")
    return _OTHERS if request.device is not None and not _holds(request.device, request) else None


def _tiles(request: Request, block: int) -> bool:
    """Returns True if kernels can compute a pattern: each device needs whole groups of heads."""
    width, devices = request.num_heads * request.head_dim, request.devices
    return fills_tiles(block) and (devices == 1 or width % (devices * LANES) == 0)


def _holds(device: Device, request: Request) -> bool:
    """Returns True if a core's memory holds the rows that the kernels for TPUs read whole."""
    itemsize = 2 if request.dtype == "bfloat16" else 4
    return device.is_gpu or buffers_of(request.longest, kernel_bytes(device), itemsize) > 0


def _is_faster(request: Request) -> Reason | None:
    if request.dtype != "bfloat16" or request.device is None or not is_faster(request.device):
        return _OTHERS
    return supports(request)


_CORE = "trainer.annexes.kernels.fused_core:"
PALLAS = Core("pallas", _CORE + "run", supports, _CORE + "order")
EXPECTED_FASTER = replace(PALLAS, supports=_is_faster)
