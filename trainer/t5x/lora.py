"""Checkpoints of LoRA, read as checkpoints of the model that they are the sums for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from trainer.config.tuning import LORA, LoraConfig
from trainer.t5x.tensors import Index, Tensor

if TYPE_CHECKING:
    from trainer.t5x.read import Checkpoint


def merged(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with LoRA's products added to their kernels; any other one as it is.

    The optimizer's state is left out, since it is that of LoRA's parameters.
    """
    prefix = f"{LORA}/"
    added = {
        name.removeprefix(prefix): tensor
        for name, tensor in checkpoint.parameters.items()
        if name.startswith(prefix)
    }
    if not added or checkpoint.run is None:
        return checkpoint
    scale = LoraConfig(**checkpoint.run["config"]["lora"]).scale
    parameters = {
        name: _sum(tensor, added[f"{name}/a"], added[f"{name}/b"], scale)
        if f"{name}/a" in added
        else tensor
        for name, tensor in checkpoint.parameters.items()
        if not name.startswith(prefix)
    }
    return dataclasses.replace(checkpoint, parameters=parameters, state={})


def _sum(kernel: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns kernel + scale * a b, of which any part can be read; axes between count layers."""

    def read(index: Index) -> np.ndarray:
        first, *between, last = index
        everything = slice(None)
        factors = a.read((first, *between, everything)), b.read((everything, *between, last))
        return kernel.read(index) + np.float32(scale) * np.einsum("d...r,r...f->d...f", *factors)

    return Tensor(kernel.shape, kernel.dtype, read)
