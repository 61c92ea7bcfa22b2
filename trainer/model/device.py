"""Facts about a device, looked up by JAX's name for its kind. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

# Implementations of the attention product, and types of logits and softmax.
AUTO = "auto"
ATTENTION_NAMES = (AUTO, "einsum", "dot_product", "cudnn", "pallas")
SOFTMAX_DTYPES = (AUTO, "float32", "bfloat16")
# Width of a TPU's registers.
LANES = 128
# Head sizes of the kernels for GPUs: tensor cores need 16 channels, and registers hold 128.
GPU_HEADS = (16, 32, 64, 128)
# NVIDIA GPUs before Ampere, whose tensor cores have no bfloat16. Earlier drivers say "Tesla V100".
_BEFORE_AMPERE = ("NVIDIA TITAN", "NVIDIA GeForce GTX", "NVIDIA GeForce RTX 20")


@dataclass(frozen=True)
class Device:
    """A device; `kind` is JAX's `device_kind`, such as "TPU v5 lite"."""

    kind: str

    @property
    def is_tpu(self) -> bool:
        """True if the kernels for TPUs are compiled rather than interpreted."""
        return self.kind.startswith("TPU")

    @property
    def is_gpu(self) -> bool:
        """True if Triton compiles Pallas kernels."""
        return self.kind.startswith(("NVIDIA", "Tesla", "Quadro", "AMD"))

    @property
    def fuses(self) -> bool:
        """True if fused attention is expected to be faster than written-out products."""
        if self.is_gpu:
            return self.kind.startswith("NVIDIA") and not self.kind.startswith(_BEFORE_AMPERE)
        return self.is_tpu and not self.kind.startswith(("TPU v2", "TPU v3"))

    def fits(self, head_dim: int) -> bool:
        """Returns True if the device's kernels can compute heads of this size."""
        return head_dim in GPU_HEADS if self.is_gpu else fills_lanes(head_dim)

    @property
    def kernel_bytes(self) -> int:
        """Bytes of a core's memory that a kernel may use; the compiler reserves the rest.

        Source: jax-ml.github.io/scaling-book, "How to Think About TPUs": 128 MiB, 16 MiB in v4.
        """
        return (14 if self.kind.startswith("TPU v4") else 64) << 20

    def attention(self, setting: str, dtype: str, head_dim: int) -> str:
        """Resolves `setting`, one of ATTENTION_NAMES, for activations of type `dtype`."""
        if setting != AUTO:
            return setting
        fused = self.fuses and dtype == "bfloat16" and self.fits(head_dim)
        return "pallas" if fused else "einsum"

    def softmax_dtype(self, setting: str, dtype: str) -> str:
        """Resolves `setting`, one of SOFTMAX_DTYPES, for activations of type `dtype`."""
        if setting != AUTO:
            return setting
        return dtype if self.is_tpu else "float32"


def fills_lanes(head_dim: int) -> bool:
    """Returns True if whole heads of this size fill a TPU's registers."""
    return head_dim % LANES == 0 or LANES % head_dim == 0


def group_width(head_dim: int) -> int:
    """Returns the channels of the fewest heads of this size that fill a TPU's registers."""
    return max(head_dim, LANES)


def fills_tiles(block: int) -> bool:
    """Returns True if the kernels' tiles consist of blocks of this size or of parts of them."""
    return block % LANES == 0 or (block >= 8 and LANES % block == 0)
