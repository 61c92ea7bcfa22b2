"""Tensors with new rows along their vocabulary axes, each the mean of one or more old rows."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tasks.terminal.command_line import UserError
from trainer.annexes.other_vocabularies.rows import NONE, Rows
from trainer.checkpoints import layout
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.tensors import Index, Tensor
from trainer.model.config import ModelConfig
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

_AXIS = "vocab"
# Number of new rows to make at a time.
_BLOCK = 4096
# Adafactor's leaves that are averages over one axis of a matrix.
_FACTORS = ("v_row", "v_col")
_FACTOR = re.compile(r"(.*?)(v_row|v_col)/(.+)")


def vocabulary_axes(model: ModelConfig) -> dict[str, int]:
    """Returns the vocabulary axis of each parameter that has one."""
    facts = parameter_facts(model_spec(replace(model, scan_layers=False)))
    named = {path: tuple(each.axes) for path, each in facts.items()}
    return {path: axes.index(_AXIS) for path, axes in named.items() if _AXIS in axes}


def changed(
    flag: str, found: Mapping[str, Parts], axes: Mapping[str, int], rows: Rows
) -> dict[str, Parts]:
    """Returns parameters and their moments with `rows` along their vocabulary axes.

    `found` has unstacked layers; `axes` is the result of `vocabulary_axes`. Raises a UserError,
    with `flag`, if a parameter's row count differs from the embedding table's.
    """
    out = dict(found)
    for name, axis in axes.items():
        if name not in found:
            continue  # reported with the other names
        value = found[name]["value"]
        if len(value.shape) <= axis or value.shape[axis] != rows.old_rows:
            raise UserError(
                f"{flag}: {name} has shape {value.shape}, which does not fit a table of "
                f"{rows.old_rows:,} rows"
            )
        out[name] = {
            part: _changed_part(part, tensor, axis, found[name], rows)
            for part, tensor in found[name].items()
        }
    return out


def _changed_part(part: str, tensor: Tensor, axis: int, parts: Parts, rows: Rows) -> Tensor:
    if not part.startswith("over"):
        return along(tensor, axis, rows)
    over = int(part[-1])
    if over != axis:
        return along(tensor, 0, rows)
    return _rescaled(tensor, parts[f"over {1 - axis}"], rows)


def changed_state(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    axes: Mapping[str, int],
    rows: Rows,
) -> dict[str, Tensor]:
    """Returns the leaves of our optimizer's state with `rows` along their vocabulary axes.

    Moments of a parameter's shape change like the parameter. Adafactor's factors are averages over
    one axis: the factor along the vocabulary changes likewise; the other is scaled to preserve the
    second moments of carried rows. `shapes` are the parameters' old shapes.
    """
    out = dict(state)
    for name, tensor in state.items():
        parameter = next((each for each in axes if name.endswith(f"/{each}")), None)
        if parameter is None or tensor.shape == (1,):
            continue
        axis, old, factor = axes[parameter], shapes[parameter], _FACTOR.fullmatch(name)
        if tensor.shape == old and not factor:
            out[name] = along(tensor, axis, rows)
            continue
        before = layout.by_size(old)
        after = layout.by_size((*old[:axis], len(rows.sources), *old[axis + 1 :]))
        if factor and before and after:
            # A row is averaged over the longer axis, which may be the other one now.
            over = before[_FACTORS.index(factor[2])]
            leaf = {kind: f"{factor[1]}{kind}/{factor[3]}" for kind in _FACTORS}
            along_rows = state[leaf[_FACTORS[before.index(1 - axis)]]]
            made = _rescaled(tensor, along_rows, rows) if over == axis else along(tensor, 0, rows)
            out[leaf[_FACTORS[after.index(over)]]] = made
    return out


def _rescaled(factor: Tensor, of_rows: Tensor, rows: Rows) -> Tensor:
    """Rescales Adafactor's average over the vocabulary to match the factor of the new rows.

    A second moment is row * column / mean(row); scaling the column by the change in the mean
    preserves it.
    """

    def read(index: Index) -> np.ndarray:
        old = of_rows.whole().astype(np.float64)
        new = along(of_rows, 0, rows).whole().astype(np.float64)
        ratio = new.mean() / old.mean() if old.any() else 1.0
        return (factor.read(index) * ratio).astype(factor.dtype)

    return Tensor(factor.shape, factor.dtype, read)


def along(tensor: Tensor, axis: int, rows: Rows) -> Tensor:
    """Returns a tensor with new rows along an axis; a row with a single source is an exact copy.

    Sums are float64 and in row order, so that a slice equals that part of the tensor bit for bit.
    """
    kept: dict[str, Any] = {}

    def old(index: Index) -> tuple[np.ndarray, np.ndarray]:
        """Returns old rows [rows, rest], and the mean row over all ids [rest]."""
        rest = str((index[:axis], index[axis + 1 :]))
        if kept.get("rest") != rest:  # devices that divide the axis read the same part in turn
            every = (*index[:axis], slice(None), *index[axis + 1 :])
            table = np.moveaxis(np.asarray(tensor.read(every)), axis, 0)
            total = np.zeros(table.shape[1:], np.float64)
            for row in table[: rows.old_ids]:
                total += row
            kept.update(rest=rest, table=table, mean=total / rows.old_ids)
        return kept["table"], kept["mean"]

    def read(index: Index) -> np.ndarray:
        table, mean = old(index)
        wanted = rows.sources[index[axis]]
        out = np.empty((len(wanted), *table.shape[1:]), tensor.dtype)
        for start in range(0, len(wanted), _BLOCK):
            block = wanted[start : start + _BLOCK]
            out[start : start + _BLOCK] = _means(table, mean, block)
        return np.moveaxis(out, 0, axis)

    shape = (*tensor.shape[:axis], len(rows.sources), *tensor.shape[axis + 1 :])
    return Tensor(shape, tensor.dtype, read)


def _means(table: np.ndarray, mean: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """Returns the mean of the rows in each line of `sources`, float64; `mean` for empty lines."""
    counts = (sources != NONE).sum(1)
    tail = (1,) * (table.ndim - 1)
    total = np.zeros((len(sources), *table.shape[1:]), np.float64)
    for column in sources.T[: counts.max(initial=0)]:
        present = column != NONE
        total[present] += table[column[present]]
    return np.where(
        counts.reshape(-1, *tail) > 0, total / np.maximum(counts, 1).reshape(-1, *tail), mean
    )
