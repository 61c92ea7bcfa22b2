"""Devices as the kernels see them. No JAX."""

from __future__ import annotations

from trainer.model.device import LANES, Device

# Head sizes of the kernels for GPUs: tensor cores need 16 channels, and registers hold 256.
GPU_HEADS = (16, 32, 64, 128, 256)
# NVIDIA GPUs before Ampere, whose tensor cores have no bfloat16. Earlier drivers say "Tesla V100".
_BEFORE_AMPERE = ("NVIDIA TITAN", "NVIDIA GeForce GTX", "NVIDIA GeForce RTX 20")


def is_faster(device: Device) -> bool:
    """Returns True if the kernels are expected to be faster than written-out products."""
    if device.is_gpu:
        return device.kind.startswith("NVIDIA") and not device.kind.startswith(_BEFORE_AMPERE)
    return device.is_tpu and not device.kind.startswith(("TPU v2", "TPU v3"))


def kernel_bytes(device: Device) -> int:
    """Returns the bytes of a core's memory that a kernel may use; the compiler reserves the rest.

    Source: jax-ml.github.io/scaling-book, "How to Think About TPUs": 128 MiB, 16 MiB in v4.
    """
    return (14 if device.kind.startswith("TPU v4") else 64) << 20


def fills_lanes(head_dim: int) -> bool:
    """Returns True if whole heads of this size fill a TPU's registers."""
    return head_dim % LANES == 0 or LANES % head_dim == 0


def group_width(head_dim: int) -> int:
    """Returns the channels of the fewest heads of this size that fill a TPU's registers."""
    return max(head_dim, LANES)


def fills_tiles(block: int) -> bool:
    """Returns True if the kernels' tiles consist of blocks of this size or of parts of them."""
    return block % LANES == 0 or (block >= 8 and LANES % block == 0)


def buffers_of(longest: int, vmem_bytes: int, itemsize: int = 2) -> int:
    """Returns how often a core's memory can hold rows of this length, which kernels read whole.

    The backward pass holds eight arrays per row, each twice for the pipeline; half of the memory
    is left for tiles and sums. With 14 MiB, as on v4, rows of 2,048 are 5% too long. Longer rows
    are held once, beside sums in float32 and transposed queries: then the next row is read only
    when one is finished, which takes little of a long row's time; a v4 has too little memory for
    the tiles of such rows. 0 means that they do not fit.
    """
    row = longest * LANES * itemsize
    if 2 * 8 * row <= vmem_bytes / 2:
        return 2
    return 1 if (8 + 4) * row <= 0.8 * vmem_bytes and vmem_bytes >= 32 << 20 else 0
