"""Caches as other programs write them: seqio's seqio_cache_tasks, and Megatron-LM's preprocessing.

seqio's are written in plain Python, as TensorFlow and seqio take seconds to import;
tests/pipeline/adopting/test_seqio_cache.py makes one by seqio itself.
"""

import json
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from tasks.storage import protobuf
from tests.support import plain_records

# Code of a token's type in an index. Source: Megatron-LM `indexed_dataset.py`, DType.
_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "uint16": 8}
Example = Mapping[str, object]


def packed(ids: Sequence[int]) -> bytes:
    """Serialises a Feature of ids as seqio does: all values in one field."""
    values = plain_records.encode_varints(np.asarray(ids, np.int64).view(np.uint64))
    return protobuf.field(3, protobuf.field(1, values) if values else b"")


def unpacked(ids: Sequence[int]) -> bytes:
    """Serialises the same Feature with a field for each value."""
    values = (plain_records.encode_varints(np.array([each]).view(np.uint64)) for each in ids)
    return protobuf.field(3, b"".join(b"\x08" + value for value in values))


def in_pieces(ids: Sequence[int]) -> bytes:
    """Serialises the same Feature with two lists, of which the second begins unpacked."""
    third = len(ids) // 3
    return packed(ids[:third]) + unpacked(ids[third : 2 * third]) + packed(ids[2 * third :])


def encode(example: Example, of_ids: Callable[[Sequence[int]], bytes] = packed) -> bytes:
    """Serialises a tf.train.Example: bytes, floats or ids by the name of the feature."""
    entries = []
    for name, value in example.items():
        if isinstance(value, bytes):
            feature = protobuf.field(1, protobuf.field(1, value))
        elif isinstance(value, float):
            feature = protobuf.field(2, protobuf.field(1, struct.pack("<f", value)))
        else:
            feature = of_ids(value)
        entry = protobuf.field(1, name.encode()) + protobuf.field(2, feature)
        entries.append(protobuf.field(1, entry))
    return protobuf.field(1, b"".join(entries))


def records(rows: Iterable[Example], of_ids: Callable[[Sequence[int]], bytes] = packed) -> bytes:
    """Returns the bytes of a file of TFRecords."""
    return b"".join(plain_records.frame(encode(row, of_ids)) for row in rows)


def write_seqio(
    folder: pathlib.Path,
    examples: Mapping[str, Sequence[Example]],
    shards: int = 2,
    features: Mapping[str, Mapping[str, object]] | None = None,
) -> pathlib.Path:
    """Writes a cache of seqio: split -> examples, cut into `shards` files in their order."""
    folder.mkdir(parents=True)
    ids = {"dtype": "int32", "shape": [None]}
    for split, rows in examples.items():
        names = rows[0].keys() if rows else ()
        known = {name: ids if "_" not in name else {"dtype": "string", "shape": []}
                 for name in names}  # fmt: skip
        borders = np.linspace(0, len(rows), shards + 1).astype(int)
        for number in range(shards):
            some = rows[borders[number] : borders[number + 1]]
            path = folder / f"{split}.tfrecord-{number:05d}-of-{shards:05d}"
            path.write_bytes(records(some))
        info = {"num_shards": shards, "features": features or known, "seqio_version": "0.0.20"}
        (folder / f"info.{split}.json").write_text(json.dumps(info if rows else {}))
        (folder / f"stats.{split}.json").write_text(json.dumps({"examples": len(rows)}))
    (folder / "COMPLETED").write_text("")
    return folder


def pair(inputs: Sequence[int], targets: Sequence[int]) -> Example:
    """Returns an example of a supervised task, with features that are not read around its ids."""
    return {
        "inputs": inputs,
        "inputs_pretokenized": b"a question",
        "targets": targets,
        "targets_pretokenized": b"an answer",
    }


def write_megatron(
    folder: pathlib.Path, name: str, rows: Sequence[Sequence[int]], kind: str = "uint16"
) -> None:
    """Writes NAME.bin and NAME.idx, a document of each row."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [np.asarray(row, kind) for row in rows]
    (folder / f"{name}.bin").write_bytes(b"".join(row.tobytes() for row in tokens))
    lengths = np.array([len(row) for row in rows], np.int32)
    begins = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(kind).itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _CODES[kind], len(rows), len(rows) + 1)
    borders = np.arange(len(rows) + 1, dtype=np.int64)
    parts = (lengths.tobytes(), begins.tobytes(), borders.tobytes())
    (folder / f"{name}.idx").write_bytes(head + b"".join(parts))
