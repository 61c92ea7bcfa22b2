"""Numba's compiler with its cache on disk, where the machine allows one."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def compiled(function: _Function) -> _Function: ...


@overload
def compiled(**options: Any) -> Callable[[_Function], _Function]: ...


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorates a function to be compiled at its first call; `options` are numba.njit's.

    The code is cached beside the source or in the user's cache folder. If neither can be written,
    as in a container without a home, every process compiles it again.
    """
    if function is None:
        return lambda function: compiled(function, **options)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(**options)(function)
