"""Tensors of a model folder: safetensors, in one file or in several with an index."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import numpy as np

from tasks.terminal.command_line import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def write(folder: str, tensors: Mapping[str, np.ndarray], max_shard_size: str) -> None:
    """Writes tensors into a local folder, as few files of at most `max_shard_size` ("5GB") as their
    order allows; a tensor larger than that has a file of its own.

    Raises:
      UserError: no such size.
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
            f"--max_shard_size={max_shard_size}: give a size, as 5GB or 300MB"
        ) from error
    for file, names in plan.filename_to_tensors.items():
        shard = {name: np.ascontiguousarray(tensors[name]) for name in names}
        path = os.path.join(folder, file)
        save_file(shard, path, metadata={"format": "pt"})
        os.chmod(path, 0o644)  # safetensors writes files for their owner alone
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as out:
            json.dump(index, out, indent=2)


def read(folder: str) -> dict[str, np.ndarray]:
    """All tensors of a local folder, in the types they were written in.

    Raises:
      UserError: there are none, or a file that the index names is missing or damaged.
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
            f"{folder} has neither {WEIGHTS} nor {INDEX}: load and save it with transformers, "
            "which writes them"
        )
    tensors: dict[str, np.ndarray] = {}
    for shard in shards:
        path = os.path.join(folder, shard)
        try:
            tensors |= load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
    return tensors
