"""Reads the row index of a shard, memory-mapped if the file is local."""

import functools
import io
import mmap
import os

import numpy as np

from tasks.cache.manifest import INDICES, Remedy
from tasks.storage import files
from tasks.terminal.command_line import UserError


def read_row_index(path: str, rows: int, remedy: Remedy, name: str | None = None) -> np.ndarray:
    """Returns the row index at `path`, [rows] of one of the types in INDICES.

    Messages name the file `name`, or else `path`, and advise `remedy`. Raises UserError if the file
    is missing, damaged, or not the index of `rows` rows.
    """
    name, again = name or path, remedy.again
    try:
        if files.is_remote(path):
            with files.open_read(path) as file:
                index = np.load(io.BytesIO(file.read()), allow_pickle=False)
        else:
            index = _mapped(files.local_path(path), rows)
    except FileNotFoundError as error:
        raise UserError(f"{name} is missing: {again}") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{name} is not a row index ({error}): {again}") from error
    if index.dtype not in INDICES:
        raise UserError(f"{name} is not a row index of this version: build the cache again")
    if index.shape != (rows,):
        raise UserError(
            f"{name} has {len(index):,} rows but the manifest says {rows:,}: {remedy.redo}"
        )
    return index


def _mapped(path: str, rows: int) -> np.ndarray:
    """Maps a local index, without numpy's parser if its header is as expected.

    The parser takes 200 µs, which every window would cost if a cache has more shards than may be
    open at once.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        for kind in INDICES:
            head = _header(kind, rows)
            if size == len(head) + rows * kind.itemsize:
                mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
                if mapped[: len(head)] == head:
                    return np.frombuffer(mapped, kind, offset=len(head))
    finally:
        os.close(file)
    return np.load(path, mmap_mode="r", allow_pickle=False)


@functools.lru_cache(maxsize=4096)
def _header(kind: np.dtype, rows: int) -> bytes:
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(kind)
    np.lib.format.write_array_header_1_0(
        head, {"descr": descr, "fortran_order": False, "shape": (rows,)}
    )
    return head.getvalue()
