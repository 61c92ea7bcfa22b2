"""Reads and writes a model folder's tensors: safetensors, one file or shards with an index."""

import json
import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tasks.terminal.command_line import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Written by the Flax models of transformers 4, which transformers 5 neither has nor reads.
FLAX = "flax_model.msgpack"
_OF_FLAX = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
# Bytes to compare at a time.
_BLOCK = 1 << 20


def size(text: str) -> int:
    """Parses --max_shard_size, such as "5GB", into bytes; raises UserError if it is invalid."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT])B", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * 1000 ** ("KMGT".index(found[2].upper()) + 1)) if found else 0
    if not size:
        raise UserError(f"--max_shard_size={text}: use a size such as 5GB or 300MB")
    return size


def write(folder: str, tensors: Mapping[str, np.ndarray], shard_bytes: int) -> None:
    """Writes tensors in order to files of at most `shard_bytes`; larger tensors get their own."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    for file, names in plan.filename_to_tensors.items():
        shard = {name: np.ascontiguousarray(tensors[name]) for name in names}
        path = os.path.join(folder, file)
        with open(path, "wb") as made:
            mode = os.fstat(made.fileno()).st_mode
        save_file(shard, path, metadata={"format": "pt"})
        os.chmod(path, mode)  # safetensors makes files readable only by their owner
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


class Place(NamedTuple):
    """A tensor's file, its type and shape, and the bounds of its bytes."""

    path: str
    form: tuple[str, tuple[int, ...]]
    begin: int
    end: int


def places(folder: str) -> dict[str, Place]:
    """Returns the places of a local folder's tensors; none if it has no readable weights."""
    index, found = os.path.join(folder, INDEX), dict[str, Place]()
    try:
        shards = [WEIGHTS]
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                shards = sorted({*json.load(file)["weight_map"].values()})
        for path in [os.path.join(folder, shard) for shard in shards]:
            with open(path, "rb") as file:
                # Source: the safetensors format: an 8-byte size, then a JSON header.
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            for name in header.keys() - {"__metadata__"}:
                begin, end = (8 + size + offset for offset in header[name]["data_offsets"])
                form = header[name]["dtype"], tuple(header[name]["shape"])
                found[name] = Place(path, form, begin, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # `read` says what is wrong
    return found


def is_flax(folder: str) -> bool:
    """Returns whether a local folder has weights of Flax and none in safetensors."""
    others = (os.path.exists(os.path.join(folder, name)) for name in (WEIGHTS, INDEX))
    return os.path.exists(os.path.join(folder, FLAX)) and not any(others)


def equal(one: Place, other: Place) -> bool:
    """Returns whether two tensors have the same type, shape and bytes."""
    if one.form != other.form or one.end - one.begin != other.end - other.begin:
        return False
    with open(one.path, "rb") as mine, open(other.path, "rb") as theirs:
        mine.seek(one.begin)
        theirs.seek(other.begin)
        for done in range(0, one.end - one.begin, _BLOCK):
            size = min(_BLOCK, one.end - one.begin - done)
            if mine.read(size) != theirs.read(size):
                return False
    return True


def read(folder: str) -> dict[str, np.ndarray]:
    """Returns a local folder's tensors in their stored dtypes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    index = os.path.join(folder, INDEX)
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            names = json.load(file)["weight_map"]
        shards = sorted(set(names.values()))
    elif os.path.exists(os.path.join(folder, WEIGHTS)):
        shards = [WEIGHTS]
    elif is_flax(folder):
        return _of_flax(os.path.join(folder, FLAX))
    else:
        raise UserError(
            f"{folder} has neither {WEIGHTS} nor {INDEX} nor {FLAX}: load the model with "
            "transformers and save it again to write them (from tf_model.h5, with transformers 4)"
        )
    tensors: dict[str, np.ndarray] = {}
    for shard in shards:
        path = os.path.join(folder, shard)
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    return tensors


def _of_flax(path: str) -> dict[str, np.ndarray]:
    """Returns the tensors of a file of Flax, as PyTorch names and lays them out.

    Source: transformers 4, `modeling_flax_pytorch_utils.py`, load_flax_weights_in_pytorch_model.
    """
    from flax import serialization, traverse_util

    try:
        with open(path, "rb") as file:
            tree = serialization.msgpack_restore(file.read())
        leaves = traverse_util.flatten_dict(tree.get("params", tree))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    found: dict[str, np.ndarray] = {}
    for (*outer, last), value in leaves.items():
        array = np.asarray(value)
        found[".".join([*outer, _OF_FLAX.get(last, last)])] = array.T if last == "kernel" else array
    return found
