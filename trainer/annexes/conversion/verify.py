"""Verifies a conversion: compares arrays bit for bit, and logits with transformers."""

import dataclasses
import os

import numpy as np

from tasks.storage import files
from tasks.vocabulary import BYTE, Vocabulary
from trainer.checkpoints import layout, stored
from trainer.huggingface import names, parity, special_ids, weights
from trainer.huggingface.folder_parity import NOT_COMPARED as NOT_COMPARED
from trainer.huggingface.folder_parity import NotEqual, random_batch
from trainer.huggingface.folder_parity import logits as logits
from trainer.model.config import ModelConfig
from trainer.model.paths import tree_of

# Number of texts made of pieces, and pieces per text.
_TEXTS, _TEXT_PIECES = 200, 64


def transformers_arrays(
    folder: str, model: ModelConfig, kind: str, arrays: dict[str, np.ndarray]
) -> int:
    """Returns a transformers folder's number of parameters; raises NotEqual if one differs."""
    stored = weights.read(folder)
    pad = special_ids.pad(files.read_json(os.path.join(folder, "config.json")))
    wanted = names.to_tensors(tree_of(arrays), model, kind, pad)
    if stored.keys() != wanted.keys():
        raise NotEqual(f"tensors of {folder} differ: {sorted(stored.keys() ^ wanted.keys())[:3]}")
    for name, array in wanted.items():
        _require_equal(name, stored[name], array)
    return len(names.by_expert(arrays).keys() & names.places(model, kind, pad).keys())


def checkpoint_arrays(path: str, arrays: dict[str, np.ndarray]) -> int:
    """Returns the number of parameters in a T5X or Palimpsest checkpoint.

    Raises NotEqual if one differs from `arrays`, which have the stored dtype.
    """
    found = layout.read_parts(stored.load(path))
    if not layout.have_positions_per_layer(arrays):
        found = layout.with_shared_positions(path, found)
    if found.keys() != arrays.keys():
        raise NotEqual(f"parameters of {path} differ: {sorted(found.keys() ^ arrays.keys())[:3]}")
    for name, array in arrays.items():
        _require_equal(name, found[name]["value"].whole(), array)
    return len(arrays)


def _require_equal(name: str, stored: np.ndarray, wanted: np.ndarray) -> None:
    same = stored.dtype == wanted.dtype and stored.shape == wanted.shape
    if not same or stored.tobytes() != np.ascontiguousarray(wanted).tobytes():
        raise NotEqual(f"{name} differs from its source; nothing was written")


def texts_of_pieces(vocabulary: Vocabulary) -> list[str]:
    """Returns texts of pieces drawn with a fixed seed, for a model without data."""
    random, ids = np.random.default_rng(0), vocabulary.ids.random_ids
    kinds = np.array(vocabulary.ids.kinds)
    ids = ids[ids < len(kinds)]
    ids = ids[kinds[ids] != BYTE]  # alone, a byte is not a character
    return [vocabulary.decode(random.choice(ids, _TEXT_PIECES)) for _ in range(_TEXTS)]


def kept_logits(
    before: tuple[ModelConfig, dict[str, np.ndarray]],
    after: tuple[ModelConfig, dict[str, np.ndarray]],
    old_of_new: np.ndarray,
) -> float:
    """Returns the largest difference between two models' logits over their common ids.

    `old_of_new`, int [kept], has the id in `before` for each id in `after`. Raises NotEqual if the
    difference exceeds float32 rounding.
    """
    model, arrays = after
    batch = random_batch(dataclasses.replace(model, vocab_size=len(old_of_new)))
    # Avoid padding, because 0 may be a piece.
    tokens = {name: np.maximum(ids, 1) for name, ids in batch.items() if name.endswith("tokens")}
    batch |= tokens
    old = batch | {name: old_of_new[ids] for name, ids in tokens.items()}
    theirs = parity.our_logits(before[0], tree_of(before[1]))(old)[0][..., old_of_new]
    mine = parity.our_logits(model, tree_of(arrays))(batch)[0][..., : len(old_of_new)]
    difference = float(np.abs(mine - theirs).max())
    if not difference <= parity.TOLERANCE * max(1.0, float(np.abs(theirs).max())):
        raise NotEqual(f"logits of the kept pieces differ by {difference:.1e}; nothing was written")
    return difference
