"""Megatron-LM data sets: NAME.bin with tokens and NAME.idx with sequence lengths.

An index is little-endian: magic (9 bytes), version (uint64), code of the token type (uint8),
numbers of sequences and of document borders (uint64 each), sequence lengths in tokens (int32 each),
sequence offsets in bytes, first sequence of each document and a final end (int64 each). Source:
Megatron-LM `megatron/core/datasets/indexed_dataset.py`.
"""

import fnmatch
import functools
import struct

import numpy as np

from pipeline.annexes.adopting.scan import Found, Scan, scan_tokens
from tasks.cache.adopted import MEGATRON
from tasks.storage import files
from tasks.terminal.command_line import UserError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
# Token types; 6 and 7 are floats.
_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def is_one(names: list[str]) -> bool:
    return any(name.endswith(".idx") for name in names)


def survey(folder: str, names: list[str], validation: str | None) -> Found:
    """Returns the data sets in a folder; names that match `validation` are validation sets."""
    splits: dict[str, list[str]] = {"train": [], "validation": []}
    kinds: dict[str, str] = {}
    for name in names:
        stem, _, kind = name.rpartition(".")
        if kind not in ("idx", "bin"):
            continue
        other = f"{stem}.{'bin' if kind == 'idx' else 'idx'}"
        if other not in names:
            raise UserError(
                f"{files.join(folder, other)} is missing, but {name} exists: restore the former "
                "from a copy, or move the latter away"
            )
        if kind == "idx":
            kinds[stem] = _kind(files.join(folder, name))
            held_out = validation is not None and fnmatch.fnmatch(stem, validation)
            splits["validation" if held_out else "train"].append(f"{stem}.bin")
    for split, found in splits.items():
        if not found and (split == "train" or validation is not None):
            raise UserError(f"--validation={validation} leaves no data set for {split}")
    if len(set(kinds.values())) > 1:
        first, second = sorted(kinds.items(), key=lambda item: item[1])[:: len(kinds) - 1]
        raise UserError(
            f"{folder} has tokens of two types, {first[1]} in {first[0]} and {second[1]} in "
            f"{second[0]}: adopt them from separate folders"
        )
    return Found(
        program=MEGATRON,
        files={split: tuple(sorted(found)) for split, found in splits.items() if found},
        examples={},
        is_pairs=False,
        scan=functools.partial(scan, folder),
        token=next(iter(kinds.values())),
        unknown=("corpus", "text"),
    )


def _kind(path: str) -> str:
    with files.open_read(path) as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise UserError(f"{path} is not a Megatron index: it does not begin with MMIDIDX")
    _, version, code, _, _ = _HEADER.unpack(head)
    if version != _VERSION:
        raise UserError(f"{path} has version {version} of Megatron's index, not {_VERSION}")
    if code not in _TYPES:
        raise UserError(f"{path} has values of type {code}, which are not token ids")
    return _TYPES[code]


def scan(folder: str, name: str, ids: int, eos: int) -> Scan:
    """Scans the data set with token file `name`, see `scan_tokens`; also checks its index."""
    path = files.join(folder, name.removesuffix(".bin") + ".idx")
    data = files.read_bytes(path)
    _, _, code, sequences, borders = _HEADER.unpack_from(data)
    if len(data) < _HEADER.size + 12 * sequences + 8 * borders:
        raise UserError(f"{path} is cut short: restore it from a copy")
    at, kind = _HEADER.size, np.dtype(_TYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    begins = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    if (lengths < 0).any() or (begins != (np.cumsum(lengths) - lengths) * kind.itemsize).any():
        raise UserError(
            f"{path} has gaps or overlaps between its sequences, which is not supported: "
            "merge the data set again with Megatron's tools/merge_datasets.py"
        )
    return scan_tokens(files.join(folder, name), ids, kind, lengths, max(0, borders - 1), eos)
