"""Verifies a conversion: arrays bit for bit, and logits against transformers."""

import dataclasses
import importlib.util
import os

import numpy as np

from tasks.storage import files
from trainer.conversion.sources import tree_of
from trainer.data.features import Batch
from trainer.huggingface import names, parity, weights
from trainer.model.config import ModelConfig
from trainer.t5x import layout, read

# Rows, input positions and target positions of the compared batch; long enough that several
# distances share a bucket of relative positions.
_ROWS, _INPUTS, _TARGETS = 4, 160, 60
# Lower ids are padding, EOS and the unknown piece.
_FIRST_ID = 3
# Largest allowed difference, as a multiple of transformers' own float32 to float64 difference.
_ROUNDINGS = 20
# Classes that compute the logits of all our heads.
_COMPARABLE = (
    *("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"),
    *("LlamaForCausalLM", "GemmaForCausalLM", "GPT2LMHeadModel", "PalimpsestForCausalLM"),
    "BertForPreTraining",
)


class NotEqual(Exception):
    """The written arrays differ from the source, or give different logits."""


def transformers_arrays(
    folder: str, model: ModelConfig, kind: str, arrays: dict[str, np.ndarray]
) -> int:
    """Returns the number of parameters of a transformers folder; raises NotEqual if one differs."""
    stored = weights.read(folder)
    wanted = names.to_tensors(tree_of(arrays), model, kind)
    if stored.keys() != wanted.keys():
        raise NotEqual(f"{folder} has other tensors: {sorted(stored.keys() ^ wanted.keys())[:3]}")
    for name, array in wanted.items():
        _require_equal(name, stored[name], array)
    return len(arrays)


def checkpoint_arrays(path: str, model: ModelConfig, arrays: dict[str, np.ndarray]) -> int:
    """Returns the number of parameters of a T5X or Palimpsest checkpoint, in the stored dtype.

    Raises NotEqual if one differs.
    """
    found = layout.read_parts(read.load(path))
    if not layout.have_positions_per_layer(arrays):
        found = layout.with_shared_positions(path, found)
    if found.keys() != arrays.keys():
        raise NotEqual(f"{path} has other parameters: {sorted(found.keys() ^ arrays.keys())[:3]}")
    for name, array in arrays.items():
        _require_equal(name, found[name]["value"].whole(), array)
    return len(arrays)


def _require_equal(name: str, stored: np.ndarray, wanted: np.ndarray) -> None:
    same = stored.dtype == wanted.dtype and stored.shape == wanted.shape
    if not same or stored.tobytes() != np.ascontiguousarray(wanted).tobytes():
        raise NotEqual(f"{name} is not what was read; nothing was written")


def logits(folder: str, model: ModelConfig, arrays: dict[str, np.ndarray]) -> str:
    """Compares the logits of a transformers folder with ours on rows of random ids.

    Returns the result, or why there was no comparison; raises NotEqual if the logits differ.
    """
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            return f"logits were not compared: the package {name} is not installed"
    written = files.read_json(os.path.join(folder, "config.json"))
    kind = next(iter(written.get("architectures") or ["an unnamed class"]))
    if kind not in _COMPARABLE:
        return f"logits were not compared: {folder} is of {kind}"
    params = tree_of({name: array.astype(np.float32) for name, array in arrays.items()})
    batch, theirs = _batch(model), parity.their_model(folder, written)
    single = parity.their_logits(theirs)(batch)
    ours = parity.our_logits(model, params)(batch)
    found = parity.compare(lambda _: ours, lambda _: single, [batch])
    if found.holds:
        return str(found)
    # Large weights amplify rounding; transformers in float64 shows how much.
    double = parity.their_logits(theirs.double())(batch)
    rounding = parity.compare(lambda _: single, lambda _: double, [batch]).difference
    if found.agreement < 1.0 or not found.difference <= _ROUNDINGS * rounding:
        raise NotEqual(
            f"transformers computes different logits: {found}; its own float32 and float64 differ "
            f"by {rounding:.1e}; nothing was written"
        )
    return f"{found}; float32 and float64 differ by {rounding:.1e} in transformers itself"


def kept_logits(
    before: tuple[ModelConfig, dict[str, np.ndarray]],
    after: tuple[ModelConfig, dict[str, np.ndarray]],
    old_of_new: np.ndarray,
) -> float:
    """Returns the largest difference between two models' logits over their common ids.

    `old_of_new` is the id in `before` of each id in `after`, int [kept]. Raises NotEqual if the
    difference exceeds float32 rounding.
    """
    model, arrays = after
    batch = _batch(dataclasses.replace(model, vocab_size=len(old_of_new)))
    # Rows without padding, because 0 may be a piece.
    tokens = {name: np.maximum(ids, 1) for name, ids in batch.items() if name.endswith("tokens")}
    batch |= tokens
    old = batch | {name: old_of_new[ids] for name, ids in tokens.items()}
    theirs = parity.our_logits(before[0], tree_of(before[1]))(old)[0][..., old_of_new]
    mine = parity.our_logits(model, tree_of(arrays))(batch)[0][..., : len(old_of_new)]
    difference = float(np.abs(mine - theirs).max())
    if not difference <= parity.TOLERANCE * max(1.0, float(np.abs(theirs).max())):
        raise NotEqual(f"logits of the kept pieces differ by {difference:.1e}; nothing was written")
    return difference


def _batch(model: ModelConfig) -> Batch:
    random = np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        ids = random.integers(_FIRST_ID, model.vocab_size, (_ROWS, length))
        lengths = np.linspace(length // 2, length, _ROWS).astype(int)
        return np.where(np.arange(length) < lengths[:, None], ids, 0).astype(np.int32)

    longest = model.max_positions if model.counts_positions else _INPUTS
    inputs, targets = min(_INPUTS, longest), min(_TARGETS, longest)
    if model.architecture == "encoder":
        ids = tokens(inputs)
        types = (np.arange(inputs) >= inputs // 3) & (ids > 0)
        return {"encoder_input_tokens": ids, "encoder_token_types": types.astype(np.int32)}
    if model.architecture == "decoder":
        targets = inputs
    ids = tokens(targets)
    batch = {
        "decoder_target_tokens": ids,
        "decoder_input_tokens": np.pad(ids, ((0, 0), (1, 0)))[:, :-1],
    }
    if model.architecture == "encoder_decoder":
        batch["encoder_input_tokens"] = tokens(inputs)
    return batch
