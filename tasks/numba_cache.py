"""Numba's compiler with an on-disk cache, where possible."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


@overload
def compiled(function: _Function) -> _Function: ...


@overload
def compiled(**options: Any) -> Callable[[_Function], _Function]: ...


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function at its first call; `options` are numba.njit's.

    Code is cached beside the source or in the user's cache folder. If neither is writable, such as
    in a container without a home folder, every process compiles it.
    """
    if function is None:
        return lambda function: compiled(function, **options)
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # "cannot cache function: no locator available"
        return numba.njit(**options)(function)
