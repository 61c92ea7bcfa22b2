"""Finds the first checkpoint whose arrays differ between two runs, and describes how."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata
from trainer.checkpoints.stored import checkpoints, raw_tensors
from trainer.checkpoints.tensors import Tensor
from trainer.engine import checksums
from trainer.engine.damage import Damaged

# Number of arrays described element by element.
_DESCRIBED = 5
# Parts of a state, the most informative first.
_ORDER = ("step", "guard", "params", "opt_state", "metrics")


@dataclasses.dataclass(frozen=True)
class Difference:
    """An array that differs.

    `kinds` are dtype and shape, None where a run lacks the array. `differing` counts elements whose
    bits differ, None if the array was not read; `index`, `values` and hexadecimal `bits` describe
    the first. `largest` is the largest absolute difference, None if not finite, and `ulps` the
    largest distance in representable numbers. `damaged` is the run, 0 or 1, whose array does not
    match its checksum.
    """

    name: str
    kinds: tuple[str | None, str | None]
    differing: int | None = None
    elements: int = 0
    index: tuple[int, ...] = ()
    values: tuple[Any, Any] | None = None
    bits: tuple[str, str] | None = None
    largest: float | None = None
    ulps: int | None = None
    damaged: int | None = None


@dataclasses.dataclass
class Compared:
    """The comparison of two runs' checkpoints at the `steps` that both have.

    `step` is the first at which an array differs or cannot be read, `differences` lists those
    arrays (only the first few are described), and `counts` has both values of each differing update
    count. Arrays were read at the steps in `verified`.
    """

    steps: list[int]
    step: int | None = None
    differences: list[Difference] = dataclasses.field(default_factory=list)
    arrays: int = 0
    counts: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    verified: list[int] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def compare(folders: tuple[str, str], verify: str = "newest") -> Compared:
    """Compares the checkpoints that both runs have, oldest first.

    Arrays with equal recorded checksums count as equal without being read, except in checkpoints
    chosen by `verify` ("none", "newest" or "all"). T5X's have no checksums, so they are read.
    """
    one, other = map(checkpoints, folders)
    common = sorted(one.keys() & other.keys())
    found = Compared(common)
    with progress.shown("comparing checkpoints", len(common)) as bar:
        for number, step in enumerate(common, 1):
            reading = verify == "all" or (verify == "newest" and step == common[-1])
            _compare_step(found, step, (one[step], other[step]), reading)
            if found.step is not None:
                break
            bar.update(number)
    return found


def _compare_step(found: Compared, step: int, paths: tuple[str, str], reading: bool) -> None:
    stored: list[dict[str, str]] = []
    tensors: list[dict[str, Tensor]] = []
    try:
        for path in paths:
            stored.append(_checksums(path))
        if reading or not all(stored) or stored[0] != stored[1]:
            for path in paths:
                tensors.append(raw_tensors(path))
    except UserError as error:
        described = len(stored) == len(paths)
        if not (described or isinstance(error, Damaged)):
            raise
        what, number = ("state", len(tensors)) if described else ("run/metadata", len(stored))
        found.notes.append(str(error))
        found.step, found.differences = step, [Difference(what, (None, None), damaged=number)]
        return
    if not all(stored):
        found.notes.append(f"checkpoint {step} lacks checksums in a run: all arrays were read")
        reading = True
        stored = [
            {name: checksums.kind_of(each) for name, each in side.items()} for side in tensors
        ]
    names = sorted(stored[0].keys() | stored[1].keys(), key=_rank)
    found.arrays = len(names)
    differ = [name for name in names if stored[0].get(name) != stored[1].get(name)]
    if reading:
        found.verified.append(step)
        differ = [name for name in names if name in differ or _unequal(tensors, stored, name)]
    if not differ:
        return
    found.step = step
    for name in differ:
        shapes = [checksums.kind(side[name]) if name in side else None for side in stored]
        if len(found.differences) < _DESCRIBED and shapes[0] == shapes[1]:
            found.differences.append(_described(name, tensors, stored))
        else:
            found.differences.append(Difference(name, (shapes[0], shapes[1])))
    found.counts = dict(_counts(differ, tensors))


def _checksums(path: str) -> dict[str, str]:
    if not files.exists(files.join(path, "run")):
        return {}
    return metadata.read(path)[metadata.CHECKSUMS]


def _array(side: dict[str, Tensor], name: str) -> np.ndarray | None:
    """Returns an array; None if it cannot be read."""
    try:
        return np.asarray(side[name].whole())
    except (UserError, KeyError):  # the list of arrays may be damaged, too
        return None


def _unequal(tensors: list[dict[str, Tensor]], stored: list[dict[str, str]], name: str) -> bool:
    """Returns whether an array differs from its checksum or the other run's array."""
    arrays = [_array(side, name) for side in tensors]
    texts = {None if array is None else checksums.of_array(array) for array in arrays}
    said = {side[name] for side in stored if ":" in side[name]}
    return len(texts | said) > 1 or None in texts


def _described(
    name: str, tensors: list[dict[str, Tensor]], stored: list[dict[str, str]]
) -> Difference:
    one, other = arrays = [_array(side, name) for side in tensors]
    damaged = None
    for number, (array, side) in enumerate(zip(arrays, stored, strict=True)):
        wrong = array is None or (":" in side[name] and checksums.of_array(array) != side[name])
        damaged = number if wrong and damaged is None else damaged
    kind = checksums.kind(stored[0][name])
    if one is None or other is None:
        return Difference(name, (kind, kind), damaged=damaged)
    return describe(name, kind, one, other, damaged)


def describe(
    name: str, kind: str, one: np.ndarray, other: np.ndarray, damaged: int | None = None
) -> Difference:
    """Describes how two arrays of one dtype and shape differ, bit for bit."""
    bits = [_bits(array) for array in (one, other)]
    unequal = np.flatnonzero(bits[0] != bits[1])
    kinds = (kind, kind)
    if not len(unequal):
        return Difference(name, kinds, 0, one.size, damaged=damaged)
    first = int(unequal[0])
    flat = [array.reshape(-1) for array in (one, other)]
    width = 2 * one.dtype.itemsize
    largest, ulps = None, None
    if one.dtype.kind not in "biu":
        places = [_ordered(side[unequal]) for side in bits]
        # int64 differences may overflow, floats do not.
        far = np.argmax(np.abs(places[0].astype(np.float64) - places[1].astype(np.float64)))
        ulps = abs(int(places[0][far]) - int(places[1][far]))
    with np.errstate(invalid="ignore", over="ignore"):
        gaps = np.abs(flat[0][unequal].astype(np.float64) - flat[1][unequal].astype(np.float64))
    if np.isfinite(gaps).all():
        largest = float(gaps.max())
    return Difference(
        name,
        kinds,
        len(unequal),
        one.size,
        tuple(int(place) for place in np.unravel_index(first, one.shape)),
        (flat[0][first].item(), flat[1][first].item()),
        (f"{int(bits[0][first]):0{width}x}", f"{int(bits[1][first]):0{width}x}"),
        largest,
        ulps,
        damaged,
    )


def _bits(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Maps the bits of floats to int64 in the floats' order, 1 apart for neighbours."""
    sign = 1 << (8 * bits.dtype.itemsize - 1)
    magnitude = (bits & bits.dtype.type(sign - 1)).astype(np.int64)
    return np.where(bits & bits.dtype.type(sign), -magnitude, magnitude)


def _counts(
    names: list[str], tensors: list[dict[str, Tensor]]
) -> Iterator[tuple[str, tuple[int, int]]]:
    for name in names:
        both = [side.get(name) for side in tensors]
        if all(each and not each.shape and each.dtype.kind in "iu" for each in both):
            one, other = (int(each.whole()) for each in both if each)
            if one != other:
                yield name, (one, other)


def _rank(name: str) -> tuple[int, list[Any]]:
    part = name.split("/")[0]
    place = _ORDER.index(part) if part in _ORDER else len(_ORDER)
    # Numeric order: layer 10 comes after layer 9.
    return place, [int(one) if one.isdigit() else one for one in re.split(r"(\d+)", name)]
