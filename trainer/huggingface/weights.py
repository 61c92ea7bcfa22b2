"""Reads and writes the tensors of a model folder: safetensors, one file or shards and an index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import numpy as np

from tasks.terminal.command_line import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write(folder: str, tensors: Mapping[str, np.ndarray], max_shard_size: str) -> None:
    """Writes tensors into a local folder, in order, as files of at most `max_shard_size`.

    Args:
      folder: local folder.
      tensors: arrays by name.
      max_shard_size: largest size of a file, as "5GB"; a larger tensor has its own file.

    Raises:
      UserError: `max_shard_size` is not a size.
    """
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    try:
        plan = split_state_dict_into_shards_factory(
            dict(tensors),
            get_storage_size=lambda tensor: tensor.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise UserError(
            f"--max_shard_size={max_shard_size}: give a size such as 5GB or 300MB"
        ) from error
    for file, names in plan.filename_to_tensors.items():
        shard = {name: np.ascontiguousarray(tensors[name]) for name in names}
        path = os.path.join(folder, file)
        save_file(shard, path, metadata={"format": "pt"})
        os.chmod(path, 0o644)  # safetensors lets only the owner read its files
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def read(folder: str) -> dict[str, np.ndarray]:
    """Returns all tensors of a local folder, in their stored dtypes.

    Raises:
      UserError: there are no tensors, or a file named in the index is missing or damaged.
    """
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
