"""How two caches and two finished runs differ."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from tasks.storage import files


def checksums(
    place: pathlib.Path, hidden: bool = True, without: Sequence[str] = ()
) -> dict[str, str]:
    """Returns relative path -> SHA-256 of all files in a folder and below it, or of one file."""
    listed = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    names = {path: str(path.relative_to(place)) for path in listed if path.name not in without}
    return {
        name: files.sha256(str(path))
        for path, name in names.items()
        if hidden or "/." not in f"/{name}"
    }


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns the names, in their order, whose values differ or are in one of the two only."""
    return [name for name in sorted({*one, *other}) if not _same(one.get(name), other.get(name))]


def cache_differences(one: pathlib.Path, other: pathlib.Path, **how: Any) -> list[str]:
    return [f"file {name}" for name in differing(checksums(one, **how), checksums(other, **how))]


def metrics_of(model_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run, without those that depend on the machine."""
    from trainer.reporting.metrics import read_metrics

    return [
        {key: value for key, value in line.items() if key != "speed"}
        for line in read_metrics(str(model_dir))
    ]


def checkpoints(model_dir: pathlib.Path) -> list[int]:
    """Returns the steps of the finished checkpoints, and 0."""
    names = [path.name.removeprefix("checkpoint_") for path in model_dir.glob("checkpoint_*")]
    return sorted([0, *(int(name) for name in names if name.isdigit())])


def run_differences(one: pathlib.Path, other: pathlib.Path) -> list[str]:
    """Returns the differences of two runs: last steps, tensors of the states there, metrics."""
    import orbax.checkpoint as ocp

    from trainer.model.paths import named

    steps = [checkpoints(folder)[-1] for folder in (one, other)]
    if steps[0] != steps[1]:
        return [f"the runs end at {steps}"]
    states, curves = [], []
    for folder in (one, other):
        path = folder.absolute() / f"checkpoint_{steps[0]}" / "state"
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
