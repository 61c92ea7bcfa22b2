"""Caches written by seqio_cache_tasks.

Source: seqio `scripts/cache_tasks_main.py` and `beam_utils.py` (GetInfo, GetStats).
"""

import functools
import re
from typing import Any

import numpy as np

from pipeline.annexes.adopting.options import PAIRS, TARGETS
from pipeline.annexes.adopting.scan import Found, Scan, scan_records
from tasks.cache import records
from tasks.cache.adopted import SEQIO
from tasks.storage import files
from tasks.terminal.command_line import UserError

_COMPLETED = "COMPLETED"
_INFO = re.compile(r"info\.(.+)\.json")
_SHARD = re.compile(r"(.+)\.(tfrecord|array_record|riegeli)-(\d{5,})-of-(\d{5,})")


def is_one(names: list[str]) -> bool:
    return any(_INFO.fullmatch(name) or _SHARD.fullmatch(name) for name in names)


def survey(folder: str, names: list[str], read: str | None) -> Found:
    """Returns a cache's files, to `read` as PAIRS or TARGETS; if None, the first row decides."""
    shards = _shards(folder, names)
    infos = {found[1] for name in names if (found := _INFO.fullmatch(name))}
    for split in sorted(set(shards) - infos):
        raise UserError(
            f"{files.join(folder, f'info.{split}.json')} is missing, but there are files of the "
            f"split {split}: restore it from a copy, or cache the task again"
        )
    if _COMPLETED not in names:
        raise UserError(
            f"{folder} is unfinished, as it has no {_COMPLETED}: run seqio_cache_tasks again"
        )
    unread, version = set[str](), ""
    has_inputs = False
    for split in sorted(infos):
        info = _json(folder, f"info.{split}.json", names)
        if not info:  # an empty split's
            continue
        features = _features(files.join(folder, f"info.{split}.json"), info)
        if split not in shards or len(shards[split]) != info.get("num_shards"):
            raise UserError(
                f"{folder} has {len(shards.get(split, ())):,} files of {split}, but info.{split}"
                f".json says {info.get('num_shards')}: restore the others from a copy"
            )
        has_inputs |= "inputs" in features
        unread |= features - {"inputs", "targets"}
        version = str(info.get("seqio_version", ""))
    if not shards:
        raise UserError(f"{folder} has no record files: cache the task again")
    is_pairs = read == PAIRS or (read is None and has_inputs and _first_has_inputs(folder, shards))
    if read == PAIRS and not has_inputs:
        raise UserError(f"--read={PAIRS}: the rows of {folder} have no inputs")
    if has_inputs and not is_pairs:
        unread.add("inputs")
    refused = has_inputs and not is_pairs and read != TARGETS
    stats = {split: _json(folder, f"stats.{split}.json", names).get("examples") for split in shards}
    return Found(
        program=SEQIO,
        files=shards,
        examples={split: count for split, count in stats.items() if isinstance(count, int)},
        is_pairs=is_pairs,
        scan=functools.partial(scan, folder, is_pairs, refused),
        unread=tuple(sorted(unread)),
        version=version,
    )


def scan(folder: str, is_pairs: bool, inputs_refused: bool, name: str, ids: int, eos: int) -> Scan:
    """Returns the content of record file `name`; see `scan_records`."""
    return scan_records(files.join(folder, name), ids, is_pairs, inputs_refused, eos)


def _shards(folder: str, names: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for name in names:
        parts = _SHARD.fullmatch(name)
        if not parts:
            continue
        split, kind = parts[1], parts[2]
        if kind != "tfrecord":
            raise UserError(
                f"{files.join(folder, name)} is a file of {kind}, but only tfrecord is read: cache "
                "the task with --output_format=tfrecord"
            )
        if counts.setdefault(split, int(parts[4])) != int(parts[4]):
            raise UserError(
                f"{folder} has files of {split} from two caches, with {counts[split]} and "
                f"{int(parts[4])} shards: delete the older cache"
            )
        found.setdefault(split, {})[int(parts[3])] = name
    for split, named in found.items():
        for index in range(counts[split]):
            if index not in named:
                name = f"{split}.tfrecord-{index:05d}-of-{counts[split]:05d}"
                raise UserError(
                    f"{files.join(folder, name)} is missing: restore it from a copy, or cache the "
                    "task again"
                )
    return {
        split: tuple(named[index] for index in range(counts[split]))
        for split, named in sorted(found.items())
    }


def _json(folder: str, name: str, names: list[str]) -> dict[str, Any]:
    path = files.join(folder, name)
    return _table(path, files.read_json(path)) if name in names else {}


def _table(path: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{path} does not have seqio's form: restore it from a copy")
    return value


def _features(path: str, info: dict[str, Any]) -> set[str]:
    """Returns the names of features; those read must be lists of integers."""
    features = _table(path, info.get("features"))
    if "targets" not in features:
        raise UserError(
            f"{path} has the features {', '.join(sorted(features)) or 'none'} but no targets, "
            "whose ids are read: rename the feature in the task and cache it again"
        )
    for name in (each for each in ("inputs", "targets") if each in features):
        kind = features[name] if isinstance(features[name], dict) else {}
        dtype, shape = kind.get("dtype"), kind.get("shape")
        if not str(dtype).startswith("int") or not isinstance(shape, list) or len(shape) != 1:
            raise UserError(
                f"{path}: {name} is {dtype} of the shape {shape}, but must be a list of integers: "
                "cache a task that tokenizes it"
            )
    return set(features)


def _first_has_inputs(folder: str, shards: dict[str, tuple[str, ...]]) -> bool:
    """Returns whether the first row has inputs, which are empty for plain text."""
    for name in [*shards.get("train", ()), *(name for shard in shards.values() for name in shard)]:
        path = files.join(folder, name)
        with files.open_read(path) as file:
            head = file.read(12)
            if not head:
                continue
            length = int.from_bytes(head[:8], "little")
            if len(head) < 12 or int.from_bytes(head[8:], "little") != records.length_crc(length):
                return False  # the scan reports the fault
            data = file.read(length)
        begins, ends = np.zeros(1, np.int64), np.array([len(data)], np.int64)
        try:
            *_, counts = records.find_lists(np.frombuffer(data, np.uint8), begins, ends, b"inputs")
        except records.CorruptRecord:
            return False  # it has none, or the scan reports the fault
        return bool(counts[0])
    return False
