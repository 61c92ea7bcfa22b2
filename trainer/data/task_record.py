"""Records of a run's tasks, stored with the run and compared on resuming.

Objectives and mixtures are code and may change between two starts. Checkpoints and config.json
therefore hold their settings, and a digest of the examples they make.
"""

import dataclasses
import enum
import hashlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tasks.document_kind import DocumentKind
from tasks.objectives import Lengths, Objective, noise
from tasks.vocabulary import PAIR_BORDER, UNK_ID, TokenIds
from trainer.config import load_record
from trainer.data.cached_task import CachedTask

# Number of windows in an objective's digest, and the seed of their tokens.
_PROBES, _PROBE_SEED = 16, 0x9E0B


def task_record(
    task: CachedTask, lengths: Lengths, rows: Lengths | None = None, by_document: bool = False
) -> dict[str, Any]:
    """Returns the settings that determine a task's examples of `lengths`, as JSON values.

    `rows` are lengths of packed rows, None for one example per row; `by_document` is True if
    a row's documents are segments.
    """
    objective = task.task.objective
    segments = {"segments": {"by": "document", "version": 1}} if by_document else {}
    packed = {"packed": {"rows": dataclasses.asdict(rows), "version": 1}} if rows else {}
    return {
        **packed,
        **segments,
        "objective": plain(objective),
        "lengths": dataclasses.asdict(lengths),
        "window_tokens": objective.window_tokens(lengths),
        "separator": task.manifest.plan.separator,
        "examples_sha256": _examples_sha256(objective, lengths, task.ids),
    }


def plain(value: Any, within: tuple[int, ...] = ()) -> Any:
    """Returns a value as JSON: dataclasses and other objects with their class name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN does not equal itself
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item, within) for item in value]
    if isinstance(value, Mapping):
        return {str(name): plain(item, within) for name, item in value.items()}
    if isinstance(value, type | Callable):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if id(value) in within:  # it refers to itself
        return type(value).__qualname__
    within = (*within, id(value))
    names = (
        [field.name for field in dataclasses.fields(value)]
        if dataclasses.is_dataclass(value)
        else sorted(getattr(value, "__dict__", ()))
    )
    settings = {name: plain(getattr(value, name), within) for name in names}
    return {"class": type(value).__qualname__, **settings}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[str]:
    """Returns one message per difference between two records that matters after `step` updates.

    `before` and `now` hold "tasks", name -> record, and "rates", [updates made before, [[name,
    share], …]] of each mixture; entries missing from either are not compared.
    """
    found: list[str] = []
    known = now.get("tasks", {})
    for task, record in before.get("tasks", {}).items():
        if task in known:
            found += _task_changes(task, record, known[task])
    if "rates" in before and "rates" in now:
        rates = [
            [entry for entry in each["rates"] if entry[0] < max(step, 1)] for each in (before, now)
        ]
        if rates[0] != rates[1]:
            found.append(f"the rates of the tasks were {_shown(rates[0])}, now {_shown(rates[1])}")
    return found


def _task_changes(task: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = dict(_leaves(before)), dict(_leaves(now))
    differ = [path for path in {**old, **new} if old.get(path) != new.get(path)]
    settings = [path for path in differ if path != "examples_sha256"]
    for path in settings:
        subject, _, rest = path.partition(".")
        name = f"{subject} of {task}" + (f": {rest}" if rest else "")
        yield f"{name} was {old.get(path)}, is {new.get(path)}"
    if differ and not settings:
        yield f"the objective of {task} makes different examples because its code has changed"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping | list):
        yield path, value
        return
    for name, item in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(item, f"{path}.{name}" if path else str(name))


def _shown(rates: list[Any]) -> str:
    return "; ".join(
        ", ".join(f"{task} {share:.4%}" for task, share in shares)
        + (f" from update {step + 1:,} on" if step else "")
        for step, shares in rates
    )


def _examples_sha256(objective: Objective, lengths: Lengths, ids: TokenIds) -> str:
    """Returns the SHA-256 of the examples of some full and some shorter windows."""
    width = objective.window_tokens(lengths)
    generator = np.random.default_rng(_PROBE_SEED)
    lengths_W = np.full(_PROBES, width, np.int64)
    lengths_W[1::4] = generator.integers(1, width + 1, len(lengths_W[1::4]))
    pieces = max(ids.first_sentinel, UNK_ID + 2)
    tokens_WN = generator.integers(UNK_ID + 1, pieces, (_PROBES, width), dtype=np.int32)
    # Windows also hold separators and unknown characters.
    rare_WN = generator.random((_PROBES, width))
    tokens_WN[rare_WN < 2 / 16] = UNK_ID
    tokens_WN[rare_WN < 1 / 16] = ids.special.eos
    if objective.unit is DocumentKind.PAIR:
        most_inputs, most_targets = objective.sides(lengths)
        border_W = np.clip(lengths_W // 2, 1, most_inputs)
        lengths_W = border_W + 1 + np.clip(lengths_W - border_W - 1, 1, most_targets)
        tokens_WN[np.arange(_PROBES), border_W] = PAIR_BORDER
    tokens_WN *= np.arange(width) < lengths_W[:, None]
    keys_W = noise.evaluation_keys(_PROBE_SEED, np.arange(_PROBES))
    made = objective.examples(tokens_WN, lengths_W, keys_W, lengths, ids)
    digest = hashlib.sha256()
    for name in sorted(made):
        values_WL, counts_W = made[name]
        for values_L, count in zip(values_WL, counts_W, strict=True):
            digest.update(f"{name} {count} ".encode() + values_L[:count].astype("<i8").tobytes())
    return digest.hexdigest()


def warn_of_changes(model_dir: str, now: dict[str, Any]) -> None:
    """Reports on stderr how `Data.tasks_record` differs from the training run's."""
    before = {"tasks": load_record(model_dir).get("tasks", {})}
    for change in changes(before, {"tasks": now}, step=0):
        print(f"warning: since {model_dir} was trained, {change}", file=sys.stderr)
