"""Loads the compiled C code: `library()` for functions, `pointer` for their arrays."""

import ctypes
import functools
import pathlib
from typing import Any

import numpy as np

from pipeline.native import build
from tasks.terminal.command_line import UserError

_INSTALL = "install again, in a clone with `make install` or `pip install --editable .`"


@functools.cache
def path() -> pathlib.Path:
    """Returns the library for this machine's system, processor and its instructions.

    Raises a UserError if the installation has none of the C code beside this file.
    """
    system, processor = build.machine()
    levels = build.LEVELS.get(processor, (build.ANY,))
    paths = [build.FOLDER / build.file_name(system, processor, level) for level in levels]
    found = [path for path in paths if path.exists()]
    if not found:
        raise UserError(
            f"{build.FOLDER} has no compiled code for {system} on {processor}, or only that of "
            f"other sources: {_INSTALL}"
        )
    # The last level runs everywhere.
    return found[0] if _loaded(found[-1]).has_v3() else found[-1]


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library; calls release Python's lock."""
    return _loaded(path())


def _loaded(file: pathlib.Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise UserError(f"{file} cannot be loaded ({error}): delete it, and {_INSTALL}") from error


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    """Returns the address of a contiguous array, which must live as long as the call."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def filled(kind: Any, values: dict[str, Any]) -> Any:
    """Returns a ctypes.Structure with `values` by name, for arrays their addresses."""
    given = {name: values[name] for name, _ in kind._fields_}
    return kind(**{n: pointer(v) if isinstance(v, np.ndarray) else v for n, v in given.items()})
