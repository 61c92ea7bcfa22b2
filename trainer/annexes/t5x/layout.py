"""The layout of T5X's scanned models, `examples/scalable_t5`.

Attention's kernels have separate axes for heads and channels, [embed, layers, heads, kv], and each
layer has a table of relative positions. Adafactor's moments of kernels are factored by name.

Source: google-research/t5x, `examples/scalable_t5` and `adafactor.py`.
"""

import re
from collections.abc import Mapping

import numpy as np

from trainer.checkpoints import layout
from trainer.checkpoints.layout import LAYER, POSITIONS, FactoredOver, Parts, by_size
from trainer.checkpoints.tensors import Tensor, reshaped

_HAS_HEADS = re.compile(r".*attention/(query|key|value|out)/kernel")
# Kernels whose last axis is "embed" (T5X's rows); in other kernels, "embed" is the first axis.
_ENDS_WITH_EMBED = re.compile(r".*(out|wo)/kernel")
# T5X's default for `min_dim_size_to_factor`.
MIN_DIM_SIZE = 128


def unstacked(parameters: Mapping[str, Tensor], moments: Mapping[str, Parts]) -> dict[str, Parts]:
    """Returns parameters and moments by name, layers unstacked, heads merged with channels."""
    found = layout.unstacked(parameters, moments, by_name)
    return {
        name: parts
        if name in parameters
        else {part: _without_heads(name, part, tensor) for part, tensor in parts.items()}
        for name, parts in found.items()
    }


def stack(parameters: Mapping[str, Parts], num_heads: int) -> dict[str, Parts]:
    """Stacks layers as T5X does."""
    parameters = _with_positions_in_layers(parameters)
    return layout.stack(
        {
            name: {
                part: _with_heads(name, part, tensor, num_heads) for part, tensor in parts.items()
            }
            if LAYER.fullmatch(name)
            else parts
            for name, parts in parameters.items()
        }
    )


def by_name(name: str) -> FactoredOver:
    """Returns T5X's factoring in `scalable_t5`: by the "embed" axis for kernels of any size."""
    if not name.endswith("/kernel"):
        return None
    return (0, 1) if _ENDS_WITH_EMBED.fullmatch(name) else (1, 0)


def t5x_factors(
    name: str, shape: tuple[int, ...], min_dim_size: int, scanned: bool
) -> FactoredOver:
    """Returns T5X's factoring of a parameter in an unscanned or scanned model."""
    in_layers = layout.is_stacked(name) or LAYER.fullmatch(name) or name.endswith(POSITIONS)
    return by_name(name) if scanned and in_layers else by_size(shape, min_dim_size)


def _without_heads(name: str, part: str, tensor: Tensor) -> Tensor:
    """Merges the [heads, kv] axes of one layer's part, which T5X keeps separate."""
    if not _HAS_HEADS.fullmatch(name):
        return tensor
    shape = tensor.shape
    if part.startswith("over"):
        return reshaped(tensor, (shape[0] * shape[1],)) if len(shape) == 2 else tensor
    if len(shape) < 3:
        return tensor
    first = shape[0] * shape[1] if _ENDS_WITH_EMBED.fullmatch(name) else shape[0]
    return reshaped(tensor, (first, int(np.prod(shape)) // first))


def _with_heads(name: str, part: str, tensor: Tensor, num_heads: int) -> Tensor:
    """Splits the merged [heads, kv] axis; the inverse of `_without_heads`."""
    if not _HAS_HEADS.fullmatch(name):
        return tensor
    heads_axis = 0 if _ENDS_WITH_EMBED.fullmatch(name) else 1
    if part == f"over {heads_axis}":
        return tensor
    place = 0 if part.startswith("over") else heads_axis
    shape = tensor.shape
    split = (num_heads, shape[place] // num_heads)
    return reshaped(tensor, (*shape[:place], *split, *shape[place + 1 :]))


def _with_positions_in_layers(parameters: Mapping[str, Parts]) -> dict[str, Parts]:
    out = dict(parameters)
    for name in parameters:
        found = LAYER.fullmatch(name)
        shared = found and parameters.get(f"{found[1]}/{POSITIONS}")
        if found and shared:
            out[f"{found[1]}/layers_{found[2]}/{POSITIONS}"] = shared
            out.pop(f"{found[1]}/{POSITIONS}", None)
    return out
