"""Compares the demo made in one folder with that of another, as `make demo-gcs` does.

python -m tests.support.same_demo demo gs://bucket/demo
"""

import hashlib
import json
import os
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

from tasks.storage import files, store
from trainer.checkpoints import remote


def hashes(folder):
    """Returns the SHA-256 of every file below `folder`, by relative name."""
    fs, inner = store.filesystem(folder)
    start = len(inner.rstrip("/")) + 1
    return {name[start:]: hashlib.sha256(fs.cat_file(name)).hexdigest() for name in fs.find(inner)}


def curve(model_dir):
    lines = files.read_bytes(files.join(model_dir, "metrics.jsonl")).decode().splitlines()
    return [{**json.loads(line), "speed": None} for line in lines]


def state(model_dir):
    names = [name for name in files.list_names(model_dir) if name.startswith("checkpoint_")]
    newest = max(names, key=lambda name: int(name.split("_")[1]))
    folder = files.join(model_dir, newest, "state")
    folder = folder if files.is_remote(folder) else os.path.abspath(folder)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    checkpointer = ocp.StandardCheckpointer()
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here),
        checkpointer.metadata(folder).item_metadata.tree,
    )
    return jax.tree.leaves(checkpointer.restore(folder, shapes))


def main(one, other):
    if files.is_remote(other):
        remote.prepare(other)
    models = [files.join(place, "model") for place in (one, other)]
    same = {}
    for part in ("vocabulary", "cache"):
        first, second = (hashes(files.join(place, part)) for place in (one, other))
        same[f"{part}: {len(first)} files"] = first == second
    first, second = map(curve, models)
    same[f"metrics: {len(first)} lines"] = first == second
    first, second = map(state, models)
    same[f"last checkpoint: {len(first)} arrays"] = len(first) == len(second) and all(
        np.array_equal(mine, theirs) for mine, theirs in zip(first, second, strict=True)
    )
    for what, equal in same.items():
        print(f"{what} {'equal' if equal else 'DIFFER'}")
    return 0 if all(same.values()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
