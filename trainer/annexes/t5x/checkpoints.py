"""Reads T5X's checkpoints lazily, in all layouts.

    checkpoint_N/state/_METADATA                        Orbax: current T5X
    checkpoint_N/state/checkpoint, .../NAME/.zarray     Orbax before _METADATA
    checkpoint_N/checkpoint, .../NAME/.zarray           T5X before Orbax: the public T5 1.1 and mT5

`checkpoint` is a msgpack tree with small arrays and references to the others: "PLACEHOLDER://NAME"
(Orbax) or a TensorStore spec (T5X). NAME is the path in the tree, joined by ".".

Source: google-research/t5x, `checkpoints.py`.
"""

import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.annexes.t5x import layout
from trainer.checkpoints import stored
from trainer.checkpoints.stored import NO_STEP, Checkpoint
from trainer.checkpoints.tensors import Tensor, held

_PLACEHOLDER = "PLACEHOLDER://"
_TREE = "checkpoint"
# Up to version 2, T5X stored bfloat16 as uint16, since zarr lacked bfloat16.
# Source: T5X, `checkpoints.VERSION`.
_FIRST_VERSION_WITH_BFLOAT16 = 3
_OLDEST_VERSION = 2


def find(path: str) -> str | None:
    """Returns `path` if it is a checkpoint, else None."""
    return path if stored.orbax_folder(path) or _tree_folder(path) else None


def checkpoints(folder: str) -> dict[int, str]:
    """Returns step -> path of a folder's finished checkpoints, ascending."""
    return {step: path for step, path in stored.named_checkpoints(folder).items() if find(path)}


def load(path: str) -> Checkpoint:
    """Opens a checkpoint and reads names, shapes and dtypes."""
    with stored.readable(path):
        if orbax := stored.orbax_folder(path):
            tensors = stored.orbax_tensors(orbax)
        else:
            tensors = _msgpack_tensors(_tree_folder(path) or path)
    parameters = stored.inside(tensors, "target/")
    if not parameters:
        raise UserError(f"{path} has neither T5X's parameters (target/…) nor ours (params/…)")
    moments: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.inside(tensors, "state/param_states/").items():
        parameter, _, moment = name.rpartition("/")
        moments.setdefault(parameter, {})[moment] = tensor
    counted = tensors.get("state/step")
    step = int(counted.whole()) if counted else NO_STEP
    parts = layout.unstacked(parameters, moments)
    return Checkpoint(path, max(step, NO_STEP), parameters, parts=parts)


def _tree_folder(path: str) -> str | None:
    """Returns the folder of a checkpoint's msgpack tree, or None."""
    folders = (files.join(path, "state"), path)
    return next((folder for folder in folders if files.exists(files.join(folder, _TREE))), None)


def _msgpack_tensors(folder: str) -> dict[str, Tensor]:
    from flax import serialization, traverse_util

    contents = serialization.msgpack_restore(files.read_bytes(files.join(folder, _TREE)))
    version = contents.get("version", _FIRST_VERSION_WITH_BFLOAT16)
    if version < _OLDEST_VERSION:
        raise ValueError(f"version {version} of T5X's layout is too old, even for T5X itself")
    leaves = traverse_util.flatten_dict(
        contents.get("optimizer", contents), is_leaf=lambda _, node: "kvstore" in node, sep="/"
    )
    tensors, places = {}, {}
    for name, leaf in leaves.items():
        if isinstance(leaf, dict):
            places[name] = (leaf["kvstore"].get("path") or leaf["path"]).rstrip("/")
        elif isinstance(leaf, str) and leaf.startswith(_PLACEHOLDER):
            places[name] = leaf.removeprefix(_PLACEHOLDER)
        elif leaf is not None:
            tensors[name] = held(leaf)
    driver = {"driver": "zarr", **(stored.NO_GAPS if "optimizer" in contents else {})}
    tensors |= stored.opened(folder, places, driver)
    if version < _FIRST_VERSION_WITH_BFLOAT16:
        return {name: _bfloat16_if_uint16(tensor) for name, tensor in tensors.items()}
    return tensors


def _bfloat16_if_uint16(tensor: Tensor) -> Tensor:
    import ml_dtypes

    if tensor.dtype != np.uint16:
        return tensor
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    return Tensor(tensor.shape, bfloat16, lambda index: tensor.read(index).view(bfloat16))
