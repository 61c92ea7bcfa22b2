"""Checksums of arrays, computed in place: on devices, or on the host with NumPy.

A checksum is exact integer arithmetic on an array's bits, independent of the mesh, the number of
processes and the summation order. Changing one element always changes it; other damage is missed
with a probability of about 2**-64. It guards against accidents, not forgery.
"""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.engine.each_array import of_each
from trainer.model.paths import named

# Odd constants of MurmurHash3's finalizer, and 2**32 divided by the golden ratio.
_SPREAD, _MIX_1, _MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
# Elements per chunk on the host, so that temporary arrays stay in its caches.
_CHUNK = 1 << 18
# Elements up to which NumPy takes less time, 5 ns each, than XLA takes to compile a program for the
# array's shape.
_MOST_ON_HOST = 1 << 18


def of_state(tree: Any) -> dict[str, str]:
    """Returns the checksum of each leaf, sharded or not, by its path; a collective call."""
    leaves = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for name, leaf in named(tree).items()
    }
    pairs = of_each(leaves.values(), _host_sums, _device_sums, _MOST_ON_HOST)
    return {
        name: _text(leaf.dtype, leaf.shape, *map(int, pair))
        for (name, leaf), pair in zip(leaves.items(), pairs, strict=True)
    }


def of_array(array: np.ndarray) -> str:
    """Returns the checksum of an array in host memory."""
    array = np.asarray(array)
    return of_parts(array.dtype, array.shape, [array])


def of_parts(dtype: Any, shape: tuple[int, ...], parts: Iterable[np.ndarray]) -> str:
    """Returns an array's checksum from consecutive parts along its first dimension."""
    return _text(dtype, shape, *_sums(parts))


def _host_sums(array: np.ndarray) -> tuple[int, int]:
    return _sums([array])


def _sums(parts: Iterable[np.ndarray]) -> tuple[int, int]:
    first = second = start = 0
    for part in parts:
        words = _host_words(part)
        for begin in range(0, words.size, _CHUNK):
            chunk = words[begin : begin + _CHUNK].astype(np.uint32)
            end = start + chunk.size
            places = np.arange(start, end, dtype=np.uint64).astype(np.uint32)
            mixed = _mixed(chunk, places, np.uint32)
            first += int(mixed.sum(dtype=np.uint32))
            second += int((mixed * (places << np.uint32(1) | np.uint32(1))).sum(dtype=np.uint32))
            start = end
    return first % 2**32, second % 2**32


def kind(checksum: str) -> str:
    """Returns the dtype and shape at the beginning of a checksum, such as "float32[8,16]"."""
    return checksum.partition(":")[0]


def kind_of(leaf: Any) -> str:
    """Returns the dtype and shape of an array, abstract or not, in the format of `kind`."""
    if _is_key(leaf):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _text(dtype: Any, shape: tuple[int, ...], first: int, second: int) -> str:
    return f"{np.dtype(dtype).name}[{','.join(map(str, shape))}]:{first:08x}{second:08x}"


def _mixed(words: Any, places: Any, uint32: Any) -> Any:
    """Returns a hash of each word and its place: for every place, a bijection of the words."""
    h = words ^ (places * uint32(_SPREAD))
    h = (h ^ (h >> uint32(16))) * uint32(_MIX_1)
    h = (h ^ (h >> uint32(13))) * uint32(_MIX_2)
    return h ^ (h >> uint32(16))


def _host_type(size: int) -> Any:
    return np.dtype(f"uint{8 * min(size, 4)}")


def _host_words(array: np.ndarray) -> np.ndarray:
    """Returns an array's bits as a flat array of unsigned integers of at most 32 bits."""
    return np.ascontiguousarray(array).reshape(-1).view(_host_type(array.dtype.itemsize))


@jax.jit
def _device_sums(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    size = array.dtype.itemsize
    words = jax.lax.bitcast_convert_type(array, _host_type(size)).astype(jnp.uint32)
    # Compute places dimension by dimension: a reshape would gather a sharded array.
    places = jnp.zeros(words.shape, jnp.uint32)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        places = places + along * jnp.uint32(stride)
    mixed = _mixed(words, places, jnp.uint32)
    weights = (places << jnp.uint32(1)) | jnp.uint32(1)
    # Compute both sums in one pass, first over rows: on CPUs, 20 times as fast as two `jnp.sum`.
    pair = (mixed, mixed * weights)
    for axes in (tuple(range(1, words.ndim)), (0,) * bool(words.ndim)):
        pair = jax.lax.reduce(pair, (jnp.uint32(0), jnp.uint32(0)), _add_pairs, axes)
    return pair


def _add_pairs(one: Any, other: Any) -> Any:
    return one[0] + other[0], one[1] + other[1]
