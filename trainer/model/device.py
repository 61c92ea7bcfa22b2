"""Facts about a device, looked up by JAX's name for its kind. No JAX."""

from __future__ import annotations

from dataclasses import dataclass

# Types of logits and softmax.
AUTO = "auto"
SOFTMAX_DTYPES = (AUTO, "float32", "bfloat16")
# Width and height of a TPU's registers.
LANES, SUBLANES = 128, 8


@dataclass(frozen=True)
class Device:
    """A device; `kind` is JAX's `device_kind`, such as "TPU v5 lite"."""

    kind: str

    @property
    def is_tpu(self) -> bool:
        return self.kind.startswith("TPU")

    @property
    def is_gpu(self) -> bool:
        return self.kind.startswith(("NVIDIA", "Tesla", "Quadro", "AMD"))

    @property
    def platform(self) -> str:
        return "tpu" if self.is_tpu else "gpu" if self.is_gpu else "cpu"

    @property
    def activates_once(self) -> bool:
        """True if an activation's gradient is better stored than computed in several products.

        On v5p and v6e it is by the compiler's schedules of T5 1.1 base (docs/benchmarks.md).
        """
        return self.kind in ("TPU v5", "TPU v5p", "TPU v6 lite", "TPU v6e")

    def softmax_dtype(self, setting: str, dtype: str) -> str:
        """Resolves `setting`, one of SOFTMAX_DTYPES, for activations of type `dtype`."""
        if setting != AUTO:
            return setting
        return dtype if self.is_tpu else "float32"
