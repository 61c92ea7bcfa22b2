"""How two caches and two finished runs differ."""

import json
import pathlib
from collections import Counter
from typing import Any

from tasks.storage import files


def checksums(folder: pathlib.Path) -> dict[str, str]:
    return {path.name: files.sha256(str(path)) for path in folder.iterdir() if path.is_file()}


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns the names, in their order, whose values differ or are in one of the two only."""
    return [name for name in sorted({*one, *other}) if not _same(one.get(name), other.get(name))]


def cache_differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    return [f"file {name}" for name in differing(checksums(one), checksums(other))]


def documents_of(cache: pathlib.Path) -> Counter[tuple]:
    """Returns how often each part of a document is in a cache, by split, id, offset and tokens."""
    from pyarrow import parquet

    counts: Counter[tuple] = Counter()
    for path in cache.glob("*.documents-*"):
        table = parquet.read_table(path, columns=["id", "document_offset", "tokens"])
        columns = (column.to_pylist() for column in table.columns)
        counts.update((path.name.split(".")[0], *entry) for entry in zip(*columns, strict=True))
    return counts


def metrics_of(model_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run, without those that depend on the machine."""
    from trainer.reporting.metrics import read_metrics

    return [
        {key: value for key, value in line.items() if key != "speed"}
        for line in read_metrics(str(model_dir))
    ]


def run_differences(one: pathlib.Path, other: pathlib.Path, step: int) -> list[str]:
    """Returns the differences between two runs: tensors of the state at a step, metrics."""
    import orbax.checkpoint as ocp

    from trainer.model.paths import named

    states, curves = [], []
    for folder in (one, other):
        path = folder.absolute() / f"checkpoint_{step}" / "state"
        states.append(dict(named(ocp.StandardCheckpointer().restore(path))))
        curves.append([json.dumps(line) for line in metrics_of(folder)])
    found = [f"tensor {name}" for name in differing(*states)]
    if len(curves[0]) != len(curves[1]):
        found.append(f"the loss curves have {len(curves[0])} and {len(curves[1])} lines")
    return found + [f"{a} is {b}" for a, b in zip(*curves, strict=False) if a != b]


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None or isinstance(one, str):
        return one == other
    import numpy as np

    left, right = np.asarray(one), np.asarray(other)
    # Compares bytes, since NaN differs from itself and 0.0 equals -0.0.
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
