"""Reads checkpoints lazily as named tensors: ours, and those of annexes' formats.

    checkpoint_N/state/_METADATA        Orbax, as this trainer writes it

A format of the slot `checkpoints` is a module with three functions: `find(path)` returns the
checkpoint at `path`, None if there is none; `checkpoints(folder)` a folder's finished ones, step ->
path, ascending; `load(path)` a `Checkpoint`. They are asked about what is not ours.

Source: google/orbax, the metadata of its PyTree handler.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import chosen_steps
from trainer.checkpoints.tensors import Index, Tensor
from trainer.engine import checksums

_METADATA, _STATE = "_METADATA", "state"
_FORMATS = "checkpoints"
# Reading part of a chunk decodes the whole chunk; with a cache, a stack's layers share chunks.
_CACHE_BYTES = 1 << 30
# Bytes per read if a tensor is only compared with its checksum.
_PIECE_BYTES = 256 << 20
# If chunks of zeros are stored, a missing chunk means data loss, not zeros.
NO_GAPS: Mapping[str, Any] = {"fill_missing_data_reads": False}
# Step of a checkpoint that does not record its number of updates.
NO_STEP = -1
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors, read lazily, under names such as "decoder/decoder_norm/scale"."""

    path: str
    step: int  # number of updates; NO_STEP if another format's has no step or a negative one
    parameters: dict[str, Tensor]  # layers may be stacked
    state: dict[str, Tensor] = field(default_factory=dict)  # of our optimizer
    run: dict[str, Any] | None = None  # the record of the run, in our checkpoints
    # In other formats: values and Adafactor's moments by name, as in `trainer.checkpoints.layout`.
    parts: dict[str, dict[str, Tensor]] | None = None


def find(path: str) -> str:
    """Returns the checkpoint at `path`, or the newest in it."""
    if orbax_folder(path):
        return path
    if found := checkpoints(path):
        return [*found.values()][-1]
    for form in annexes.every(_FORMATS):
        if one := form.find(path):
            return one
    if files.exists(files.join(path, "config.json")) and any(
        name.endswith((".safetensors", ".bin", ".safetensors.index.json"))
        for name in files.list_names(path)
    ):
        raise UserError(f"{path} is a transformers folder: name it as --init_from=hf:{path}")
    others = "".join(f", or one of {name}" for name in annexes.entries(_FORMATS))
    raise UserError(
        f"{path} neither is nor holds a checkpoint: there is neither {_STATE}/{_METADATA} (Orbax) "
        f"nor a folder checkpoint_STEP with it{others}"
    )


def is_checkpoint(path: str) -> bool:
    """Returns whether `path` is one checkpoint rather than a folder of them."""
    forms = annexes.every(_FORMATS)
    return bool(orbax_folder(path)) or any(form.find(path) for form in forms)


def checkpoints(folder: str) -> dict[int, str]:
    """Returns step -> path of a folder's finished checkpoints, ascending."""
    named = named_checkpoints(folder)
    ours = {step: path for step, path in named.items() if orbax_folder(path)}
    if ours and len(ours) == len(named):
        return ours
    of_others = (form.checkpoints(folder) for form in annexes.every(_FORMATS))
    return next(filter(None, of_others), ours)


def named_checkpoints(folder: str) -> dict[int, str]:
    """Returns step -> path of the folders checkpoint_STEP, finished or not, ascending."""
    found = [re.fullmatch(r"checkpoint_(\d+)", name) for name in files.list_names(folder)]
    numbers = sorted(int(match[1]) for match in found if match)
    return {number: files.join(folder, f"checkpoint_{number}") for number in numbers}


def steps(folder: str) -> list[int]:
    """Returns the steps of a folder's finished checkpoints, ascending."""
    return [*checkpoints(folder)]


def chosen(folder: str, step: int) -> str:
    """Returns the path of a folder's checkpoint; raises UserError if this step has none."""
    found = checkpoints(folder)
    chosen_steps(str(step), [*found], folder)
    return found[step]


def load(path: str) -> Checkpoint:
    """Opens the checkpoint at `path`, or the newest in that folder; reads names, shapes and dtypes.

    Parameters that an annex added to the model's own are merged into these.
    """
    path = find(path)
    folder = orbax_folder(path)
    if folder is not None:
        with readable(path):
            tensors = orbax_tensors(folder)
        if "step" in tensors and any(name.startswith("params/") for name in tensors):
            return _ours(path, tensors)
    for form in annexes.every(_FORMATS):
        if form.find(path):
            return form.load(path)
    raise UserError(f"{path} does not have our parameters (params/…)")


def inside(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Returns the tensors whose names have a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _ours(path: str, tensors: Mapping[str, Tensor]) -> Checkpoint:
    run = metadata.read(path)
    stored = run[metadata.CHECKSUMS]
    tensors = {name: _checked(path, name, stored, tensor) for name, tensor in tensors.items()}
    parameters, state = inside(tensors, "params/"), inside(tensors, "opt_state/")
    step = int(tensors["step"].whole())
    for added, reference in annexes.entries("added_parameters").items():
        if any(name.startswith(f"{added}/") for name in parameters) and "config" in run:
            # The state belongs to what was added, which merging removes.
            parameters, state = annexes.load(reference)(parameters, run["config"]), {}
    return Checkpoint(path, step, parameters, state, run)


def raw_tensors(path: str) -> dict[str, Tensor]:
    """Returns all arrays of one of our checkpoints by path, without comparing checksums."""
    folder = orbax_folder(path)
    with readable(path):
        if folder is None:
            raise ValueError(f"it has no {_STATE}/{_METADATA}")
        return orbax_tensors(folder)


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turns errors of a read into one UserError."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise UserError(f"{path} cannot be read: {_first_line(error)}") from error


def _checked(path: str, name: str, stored: dict[str, str], tensor: Tensor) -> Tensor:
    """Returns a tensor whose first read checks the whole tensor against its checksum, if stored."""
    if name not in stored:
        return tensor
    sound = False

    def read(index: Index) -> np.ndarray:
        nonlocal sound
        value = tensor.read(index)
        if not sound:
            parts = [value] if value.shape == tensor.shape else _pieces(tensor)
            found = checksums.of_parts(tensor.dtype, tensor.shape, parts)
            metadata.compare(path, stored, {name: found})
            sound = True
        return value

    return Tensor(tensor.shape, tensor.dtype, read)


def _pieces(tensor: Tensor) -> Iterator[np.ndarray]:
    rows = tensor.shape[0]
    row_bytes = max(1, math.prod(tensor.shape[1:]) * tensor.dtype.itemsize)
    step = max(1, _PIECE_BYTES // row_bytes)
    rest = (slice(None),) * (len(tensor.shape) - 1)
    for start in range(0, rows, step):
        yield tensor.read((slice(start, min(start + step, rows)), *rest))


def orbax_folder(path: str) -> str | None:
    """Returns the folder of a checkpoint's Orbax tree; None if `path` has none."""
    folders = (files.join(path, _STATE), path)
    return next((folder for folder in folders if files.exists(files.join(folder, _METADATA))), None)


def orbax_tensors(folder: str) -> dict[str, Tensor]:
    """Opens the arrays of an Orbax tree."""
    metadata = files.read_json(files.join(folder, _METADATA))
    names = [
        "/".join(str(part["key"]) for part in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if entry["value_metadata"]["value_type"] in _ARRAYS
    ]
    driver: dict[str, Any] = {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr"}
    if metadata.get("store_array_data_equal_to_fill_value"):
        driver.update(NO_GAPS)
    return opened(folder, {name: name.replace("/", ".") for name in names}, driver)


def opened(folder: str, places: dict[str, str], driver: dict[str, Any]) -> dict[str, Tensor]:
    """Opens TensorStore arrays; `places` maps names to paths in `folder`."""
    import tensorstore

    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    root = _kvstore(folder)
    ocdbt = files.exists(files.join(folder, "manifest.ocdbt"))

    def spec(place: str) -> dict[str, Any]:
        if ocdbt:
            return {"driver": "ocdbt", "base": root, "path": f"{place}/"}
        return {**root, "path": f"{root['path']}{place}/"}

    opening = {
        name: tensorstore.open(
            {**driver, "kvstore": spec(place)}, open=True, read=True, context=context
        )
        for name, place in places.items()
    }

    def one(name: str) -> Tensor:
        try:
            array = opening[name].result()
        except ValueError as error:
            raise ValueError(f"{name}: {_first_line(error)}") from error

        def read(index: Index) -> np.ndarray:
            try:
                return array[index].read().result()
            except Exception as error:  # TensorStore raises many kinds.
                raise UserError(
                    f"{name} in {folder} cannot be read: {_first_line(error)}"
                ) from error

        return Tensor(tuple(array.shape), array.dtype.numpy_dtype, read)

    return {name: one(name) for name in opening}


def _kvstore(folder: str) -> dict[str, Any]:
    if not files.is_remote(folder):
        return {"driver": "file", "path": os.path.abspath(files.local_path(folder)) + "/"}
    scheme, _, rest = folder.partition("://")
    bucket, _, inner = rest.partition("/")
    drivers = {"gs": "gcs", "s3": "s3"}
    if scheme not in drivers:
        raise UserError(f"{folder}: checkpoints are read from local folders, gs:// and s3:// only")
    return {"driver": drivers[scheme], "bucket": bucket, "path": f"{inner.rstrip('/')}/"}


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
