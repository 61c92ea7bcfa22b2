"""Reads and writes a model folder's tensors: safetensors, one file or shards with an index."""

import json
import os
import re
from collections.abc import Mapping

import numpy as np

from tasks.terminal.command_line import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


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
        save_file(shard, path, metadata={"format": "pt"})
        os.chmod(path, 0o644)  # safetensors makes files readable only by their owner
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def tensor_names(folder: str) -> frozenset[str]:
    """Returns the names of a local folder's tensors; none if it has no readable weights."""
    index, single = os.path.join(folder, INDEX), os.path.join(folder, WEIGHTS)
    try:
        if os.path.exists(index):
            with open(index, encoding="utf-8") as file:
                return frozenset(json.load(file)["weight_map"])
        with open(single, "rb") as file:
            # Source: the safetensors format: an 8-byte size, then a JSON header.
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return frozenset(header) - {"__metadata__"}
    except (OSError, ValueError, KeyError):
        return frozenset()  # `read` says what is wrong


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
    else:
        raise UserError(
            f"{folder} has neither {WEIGHTS} nor {INDEX}: load the model with transformers and "
            "save it again to write them"
        )
    tensors: dict[str, np.ndarray] = {}
    for shard in shards:
        path = os.path.join(folder, shard)
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    return tensors
