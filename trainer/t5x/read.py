"""Reads checkpoints lazily as named tensors: T5X's in all layouts, Mesh TensorFlow's and ours.

    checkpoint_N/state/_METADATA                        Orbax: current T5X, and ours
    checkpoint_N/state/checkpoint, .../NAME/.zarray     Orbax before _METADATA
    checkpoint_N/checkpoint, .../NAME/.zarray           T5X before Orbax: the public T5 1.1 and mT5
    model.ckpt-N.index, model.ckpt-N.data-...           Mesh TensorFlow: see `trainer.t5x.mesh`

`checkpoint` is a msgpack tree with small arrays and references to the others: "PLACEHOLDER://NAME"
(Orbax) or a TensorStore spec (T5X). NAME is the path in the tree, joined by ".".

Source: google-research/t5x, `checkpoints.py`; google/orbax, the metadata of its PyTree handler.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata
from trainer.checkpoints.checkpoint import chosen_steps
from trainer.config.lora import LORA, LoraConfig
from trainer.engine import checksums
from trainer.t5x import mesh
from trainer.t5x.tensors import Index, Tensor, held

_PLACEHOLDER = "PLACEHOLDER://"
_METADATA, _TREE, _STATE = "_METADATA", "checkpoint", "state"
# Up to version 2, T5X stored bfloat16 as uint16, since zarr lacked bfloat16.
# Source: T5X, `checkpoints.VERSION`.
_FIRST_VERSION_WITH_BFLOAT16 = 3
_OLDEST_VERSION = 2
# Reading part of a chunk decodes the whole chunk; with a cache, a stack's layers share chunks.
_CACHE_BYTES = 1 << 30
# Bytes per read if a tensor is only compared with its checksum.
_PIECE_BYTES = 256 << 20
# If chunks of zeros are stored, a missing chunk means data loss, not zeros.
_NO_GAPS: Mapping[str, Any] = {"fill_missing_data_reads": False}
# Step of a checkpoint that does not record its number of updates.
NO_STEP = -1
_ARRAYS = ("jax.Array", "np.ndarray", "scalar")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors, read lazily, under names such as "decoder/decoder_norm/scale"."""

    path: str
    step: int  # number of updates; NO_STEP if T5X's state has no step or a negative one
    parameters: dict[str, Tensor]  # layers may be stacked
    # T5X's Adafactor state: parameter -> {"m", "v", "v_row" or "v_col": tensor}; ours is `state`.
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    run: dict[str, Any] | None = None  # the record of the run, in our checkpoints


def find(path: str) -> str:
    """Returns the checkpoint at `path`, or the newest in it; for Mesh TensorFlow, the prefix."""
    if is_checkpoint(path):
        return mesh.prefix_of(path) or path
    if found := steps(path):
        return of_step(path, found[-1])
    if files.exists(files.join(path, "config.json")) and any(
        name.endswith((".safetensors", ".bin", ".safetensors.index.json"))
        for name in files.list_names(path)
    ):
        raise UserError(f"{path} is a transformers folder: name it as --init_from=hf:{path}")
    raise UserError(
        f"{path} neither is nor holds a checkpoint: there is neither {_STATE}/{_METADATA} (Orbax) "
        f"nor {_TREE} (T5X) nor a folder checkpoint_STEP with one of these, nor "
        "model.ckpt-STEP.index (Mesh TensorFlow)"
    )


def is_checkpoint(path: str) -> bool:
    """Returns whether `path` is one checkpoint rather than a folder of them."""
    return bool(_tree_folder(path) or mesh.prefix_of(path))


def steps(folder: str) -> list[int]:
    """Returns the steps of a folder's finished checkpoints, ascending."""
    found = [re.fullmatch(r"checkpoint_(\d+)", name) for name in files.list_names(folder)]
    numbers = sorted(int(match[1]) for match in found if match)
    whole = [n for n in numbers if _tree_folder(files.join(folder, f"checkpoint_{n}"))]
    return whole or [*mesh.prefixes(folder)]


def of_step(folder: str, step: int) -> str:
    """Returns the path of a checkpoint found by `steps(folder)`."""
    path = files.join(folder, f"checkpoint_{step}")
    return path if _tree_folder(path) else mesh.prefixes(folder)[step]


def chosen(folder: str, step: int) -> str:
    """Returns the path of a folder's checkpoint; raises UserError if this step has none."""
    chosen_steps(str(step), steps(folder), folder)
    return of_step(folder, step)


def load(path: str) -> Checkpoint:
    """Opens the checkpoint at `path`, or the newest in that folder; reads names, shapes and dtypes.

    LoRA's products are merged into their kernels.
    """
    path = find(path)
    folder = _tree_folder(path)
    if folder is None:
        found = mesh.load(path)
        step = NO_STEP if found.step is None else found.step
        return Checkpoint(path, step, found.parameters, found.moments)
    with _readable(path):
        orbax = files.exists(files.join(folder, _METADATA))
        tensors = _orbax_tensors(folder) if orbax else _msgpack_tensors(folder)

    def inside(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }

    parameters = inside("target/")
    if parameters:
        moments: dict[str, dict[str, Tensor]] = {}
        for name, tensor in inside("state/param_states/").items():
            parameter, _, moment = name.rpartition("/")
            moments.setdefault(parameter, {})[moment] = tensor
        stored = tensors.get("state/step")
        step = int(stored.whole()) if stored else NO_STEP
        return Checkpoint(path, max(step, NO_STEP), parameters, moments)
    parameters = inside("params/")
    if not parameters or "step" not in tensors:
        raise UserError(f"{path} has neither T5X's parameters (target/…) nor ours (params/…)")
    run = metadata.read(path)
    stored = run[metadata.CHECKSUMS]
    tensors = {name: _checked(path, name, stored, tensor) for name, tensor in tensors.items()}
    parameters, state = inside("params/"), inside("opt_state/")
    step = int(tensors["step"].whole())
    if any(name.startswith(f"{LORA}/") for name in parameters) and "config" in run:
        # The state belongs to LoRA's parameters, which merging removes.
        parameters, state = _merged(parameters, LoraConfig(**run["config"]["lora"])), {}
    return Checkpoint(path, step, parameters, state=state, run=run)


def _merged(parameters: dict[str, Tensor], config: LoraConfig) -> dict[str, Tensor]:
    """Returns the kernels plus LoRA's products, read lazily; middle axes index layers."""

    def merged(kernel: Tensor, a: Tensor, b: Tensor) -> Tensor:
        def read(index: Index) -> np.ndarray:
            first, *between, last = index
            everything = slice(None)
            factors = a.read((first, *between, everything)), b.read((everything, *between, last))
            product = np.einsum("d...r,r...f->d...f", *factors)
            return kernel.read(index) + np.float32(config.scale) * product

        return Tensor(kernel.shape, kernel.dtype, read)

    found = {}
    for name, tensor in parameters.items():
        if not name.startswith(f"{LORA}/"):
            a, b = (parameters.get(f"{LORA}/{name}/{side}") for side in "ab")
            found[name] = merged(tensor, a, b) if a and b else tensor
    return found


def raw_tensors(path: str) -> dict[str, Tensor]:
    """Returns all arrays of one of our checkpoints by path, without comparing checksums."""
    folder = _tree_folder(path)
    with _readable(path):
        if folder is None or not files.exists(files.join(folder, _METADATA)):
            raise ValueError(f"it has no {_STATE}/{_METADATA}")
        return _orbax_tensors(folder)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
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


def _tree_folder(path: str) -> str | None:
    """Returns the folder of a checkpoint's tree; None if `path` is not a checkpoint."""
    for folder in (files.join(path, _STATE), path):
        if any(files.exists(files.join(folder, name)) for name in (_METADATA, _TREE)):
            return folder
    return None


def _orbax_tensors(folder: str) -> dict[str, Tensor]:
    metadata = files.read_json(files.join(folder, _METADATA))
    names = [
        "/".join(str(part["key"]) for part in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if entry["value_metadata"]["value_type"] in _ARRAYS
    ]
    driver: dict[str, Any] = {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr"}
    if metadata.get("store_array_data_equal_to_fill_value"):
        driver.update(_NO_GAPS)
    return _stored(folder, {name: name.replace("/", ".") for name in names}, driver)


def _msgpack_tensors(folder: str) -> dict[str, Tensor]:
    from flax import serialization, traverse_util

    contents = serialization.msgpack_restore(files.read_bytes(files.join(folder, _TREE)))
    version = contents.get("version", _FIRST_VERSION_WITH_BFLOAT16)
    if version < _OLDEST_VERSION:
        raise ValueError(f"version {version} of T5X's layout is too old, even for T5X itself")
    leaves = traverse_util.flatten_dict(
        contents.get("optimizer", contents), is_leaf=lambda _, node: "kvstore" in node, sep="/"
    )
    tensors, stored = {}, {}
    for name, leaf in leaves.items():
        if isinstance(leaf, dict):
            stored[name] = (leaf["kvstore"].get("path") or leaf["path"]).rstrip("/")
        elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
            stored[name] = leaf.removeprefix(_PLACEHOLDER)
        elif leaf is not None:
            tensors[name] = held(leaf)
    driver = {"driver": "zarr", **(_NO_GAPS if "optimizer" in contents else {})}
    tensors |= _stored(folder, stored, driver)
    if version < _FIRST_VERSION_WITH_BFLOAT16:
        return {name: _bfloat16_if_uint16(tensor) for name, tensor in tensors.items()}
    return tensors


def _bfloat16_if_uint16(tensor: Tensor) -> Tensor:
    import ml_dtypes

    if tensor.dtype != np.uint16:
        return tensor
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return Tensor(tensor.shape, bfloat16, lambda index: tensor.read(index).view(bfloat16))


def _stored(folder: str, places: dict[str, str], driver: dict[str, Any]) -> dict[str, Tensor]:
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

    def opened(name: str) -> Tensor:
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

    return {name: opened(name) for name in opening}


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
