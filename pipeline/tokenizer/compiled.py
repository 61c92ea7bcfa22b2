"""Numba's compiler, keeping what it compiled wherever this machine allows."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable | None = None, **options: Any) -> Any:
    """Decorates a function to be compiled at its first call; `options` are numba.njit's.

    The code is kept beside the source or in the user's cache folder. Where neither can be written,
    as in a container without a home, every process compiles for itself.
    """
    if function is None:
        return lambda function: compiled(function, **options)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(**options)(function)
