"""Compares the logits of transformers with ours, for the model in a folder."""

import importlib.util
import os

import numpy as np

from tasks.storage import files
from trainer.data.features import Batch
from trainer.huggingface import parity, special_ids, weights
from trainer.huggingface.kinds import KINDS
from trainer.model.config import ModelConfig
from trainer.model.paths import tree_of

# Rows, input positions and target positions of the compared batch: enough positions that several
# distances share a bucket of relative positions.
_ROWS, _INPUTS, _TARGETS = 4, 160, 60
# Lower ids are padding, EOS and the unknown piece.
_FIRST_ID = 3
# Largest allowed difference, as a multiple of transformers' own difference of float32 and float64.
_ROUNDINGS = 20
# Beginning of a result without a comparison.
NOT_COMPARED = "logits were not compared: "


class NotEqual(Exception):
    """The written arrays differ from the source, or give different logits."""


def logits(folder: str, model: ModelConfig, arrays: dict[str, np.ndarray]) -> str:
    """Compares a transformers folder's logits with ours on rows of random ids.

    Returns the result, or the reason for making no comparison; raises NotEqual if logits differ.
    """
    if why := obstacle(folder):
        return NOT_COMPARED + why
    written = files.read_json(os.path.join(folder, "config.json"))
    if not parity.has_class(written):
        return f"{NOT_COMPARED}this release of transformers has no {written['architectures'][0]}"
    params = tree_of({name: array.astype(np.float32) for name, array in arrays.items()})
    batch, theirs = random_batch(model), parity.their_model(folder, written)
    if (pad := special_ids.pad(written)) >= _FIRST_ID:  # RoBERTa would not number its places
        batch = {name: np.where(ids == pad, _FIRST_ID - 1, ids) for name, ids in batch.items()}
    single = parity.their_logits(theirs)(batch)
    ours = parity.our_logits(model, params)(batch)
    found = parity.compare(lambda _: ours, lambda _: single, [batch])
    if all(np.ptp(each, axis=-1).max() == 0 for each in ours):  # as a head of zeros makes them
        return f"{NOT_COMPARED}they are the same for all tokens, so that they tell nothing"
    if found.holds:
        return str(found)
    # Large weights amplify rounding; running transformers in float64 shows by how much.
    double = parity.their_logits(theirs.double())(batch)
    rounding = parity.compare(lambda _: single, lambda _: double, [batch]).difference
    if found.agreement < 1.0 or not found.difference <= _ROUNDINGS * rounding:
        raise NotEqual(
            f"transformers computes different logits: {found}; its own float32 and float64 differ "
            f"by {rounding:.1e}; nothing was written"
        )
    return f"{found}; float32 and float64 differ by {rounding:.1e} in transformers itself"


def obstacle(folder: str) -> str | None:
    """Returns why a transformers folder's logits cannot be compared with ours; None if they can."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed"
    if weights.is_flax(folder):
        return f"transformers 5 does not read {weights.FLAX}"
    written = files.read_json(os.path.join(folder, "config.json"))
    known, kind = KINDS[written["model_type"]].compared, (written.get("architectures") or [""])[0]
    if kind not in known:
        return f"the model in {folder} is a {kind or 'class without a name'}, not a {known[0]}"
    return None


def random_batch(model: ModelConfig) -> Batch:
    """Returns rows of ids drawn with a fixed seed."""
    random = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        ids = random.integers(_FIRST_ID, model.vocab_size, (_ROWS, length))
        lengths = np.linspace(length // 2, length, _ROWS).astype(int)
        return np.where(np.arange(length) < lengths[:, None], ids, 0).astype(np.int32)

    longest = model.max_positions if model.counts_positions else _INPUTS
    inputs, targets = min(_INPUTS, longest), min(_TARGETS, longest)
    if not model.has_decoder:
        ids = tokens(inputs)
        types = (np.arange(inputs) >= inputs // 3) & (ids > 0)
        return {"encoder_input_tokens": ids, "encoder_token_types": types.astype(np.int32)}
    if not model.has_encoder:
        targets = inputs
    ids = tokens(targets)
    batch = {
        "decoder_target_tokens": ids,
        "decoder_input_tokens": np.pad(ids, ((0, 0), (1, 0)))[:, :-1],
    }
    if model.has_both_stacks:
        batch["encoder_input_tokens"] = tokens(inputs)
    return batch
