"""Lazily read tensors, and functions that stack, slice and reshape them without reading."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# One slice per dimension.
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """A tensor read on demand: `read(index)` returns the part at `index`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]

    def whole(self) -> np.ndarray:
        return self.read((slice(None),) * len(self.shape))


def held(array: np.ndarray | np.generic) -> Tensor:
    """Wraps an in-memory array as a tensor."""
    array = np.asarray(array)
    return Tensor(array.shape, array.dtype, array.__getitem__)


def stacked(tensors: Sequence[Tensor], axis: int) -> Tensor:
    """Stacks tensors with equal shapes and dtypes along a new axis."""
    shape, dtype = tensors[0].shape, tensors[0].dtype

    def read(index: Index) -> np.ndarray:
        rest = index[:axis] + index[axis + 1 :]
        return np.stack([tensor.read(rest) for tensor in tensors[index[axis]]], axis)

    return Tensor((*shape[:axis], len(tensors), *shape[axis:]), dtype, read)


def divided(tensor: Tensor, axis: int) -> list[Tensor]:
    """Returns a tensor's slices along `axis`; the inverse of `stacked`."""

    def part(number: int) -> Tensor:
        def read(index: Index) -> np.ndarray:
            one = slice(number, number + 1)
            return tensor.read((*index[:axis], one, *index[axis:])).squeeze(axis)

        return Tensor(tensor.shape[:axis] + tensor.shape[axis + 1 :], tensor.dtype, read)

    return [part(number) for number in range(tensor.shape[axis])]


def mean(tensor: Tensor, axis: int) -> Tensor:
    """Averages over one axis and drops it."""

    def read(index: Index) -> np.ndarray:
        return tensor.read((*index[:axis], slice(None), *index[axis:])).mean(axis)

    return Tensor(tensor.shape[:axis] + tensor.shape[axis + 1 :], tensor.dtype, read)


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshapes a tensor; reading any part reads the whole."""
    return Tensor(shape, tensor.dtype, lambda index: tensor.whole().reshape(shape)[index])
