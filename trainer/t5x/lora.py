"""Reads a LoRA checkpoint as a model with LoRA's products merged into its kernels."""

import numpy as np

from trainer.config.lora import LORA, LoraConfig
from trainer.t5x.tensors import Index, Tensor

_PREFIX = f"{LORA}/"


def has_lora(parameters: dict[str, Tensor]) -> bool:
    """Returns whether any LoRA factors are present."""
    return any(name.startswith(_PREFIX) for name in parameters)


def merged(parameters: dict[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Adds LoRA's products to their kernels."""
    found = {}
    for name, tensor in parameters.items():
        if not name.startswith(_PREFIX):
            a, b = (parameters.get(f"{_PREFIX}{name}/{side}") for side in "ab")
            found[name] = _sum(tensor, a, b, config.scale) if a and b else tensor
    return found


def _sum(kernel: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns kernel + scale * a b, read lazily; middle axes index layers."""

    def read(index: Index) -> np.ndarray:
        first, *between, last = index
        everything = slice(None)
        factors = a.read((first, *between, everything)), b.read((everything, *between, last))
        return kernel.read(index) + np.float32(scale) * np.einsum("d...r,r...f->d...f", *factors)

    return Tensor(kernel.shape, kernel.dtype, read)
