"""Looking at each array of a state: on the host where it lies there, otherwise on the devices."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np


def of_each(
    arrays: Iterable[jax.Array],
    on_host: Callable[[np.ndarray], Any],
    on_devices: Callable[[jax.Array], Any],
    most_on_host: float,
) -> list[Any]:
    """Returns what a function returns for each array, with NumPy scalars for JAX's.

    `on_devices`, a jitted function, is compiled for each shape and sharding; all processes call
    this together. `on_host` spares that for arrays of at most `most_on_host` elements that lie in
    this process's memory.
    """
    # Start all programs before waiting for the first, except where those that communicate between
    # devices must not run concurrently: on CPUs, each may hold threads that others need.
    one_by_one = jax.device_count() > 1 and jax.default_backend() == "cpu"
    found = []
    for array in arrays:
        if array.size <= most_on_host and _is_on_host(array):
            found.append(on_host(np.asarray(array)))
            continue
        found.append(on_devices(array))
        if one_by_one:
            jax.block_until_ready(found[-1])
    return jax.device_get(found)


def _is_on_host(array: jax.Array) -> bool:
    devices: list[Any] = [*array.sharding.device_set]
    return len(devices) == 1 and devices[0].platform == "cpu"
