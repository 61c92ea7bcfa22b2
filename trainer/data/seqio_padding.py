"""Rows of seqio for a vocabulary whose id 0 is a piece.

seqio fills rows with 0 and takes every 0 for padding: in loss weights, segment ids and positions of
packed examples. So its feature converters get every id plus 1, and `ids_of` subtracts it again.
Only segment ids then mark tokens.
"""

from typing import Any

import numpy as np

from tasks.vocabulary import T5_IDS, SpecialIds
from trainer.data.features import Batch

_SIDES = ("inputs", "targets")


def special_of(vocabulary: Any) -> SpecialIds:
    """Returns the special ids of a seqio.Vocabulary for the model.

    They are T5's if id 0 pads rows, as in every vocabulary that seqio was made for.
    """
    zero_pads = getattr(vocabulary, "zero_pads", None)
    pad = None
    if zero_pads is None:
        pad_id = getattr(getattr(vocabulary, "tokenizer", None), "pad_id", None)
        pad = pad_id() if pad_id else 0
        zero_pads = pad == 0
    if zero_pads:
        return T5_IDS
    optional = (pad, vocabulary.unk_id, vocabulary.bos_id)
    pad, unk, bos = (None if number is None or number < 0 else int(number) for number in optional)
    return SpecialIds(pad, int(vocabulary.eos_id), unk, bos)


def shifting(converter: type) -> type:
    """Returns a subclass of one of seqio's feature converters whose features are ids plus 1."""

    class Shifting(converter):
        def _convert_features(self, ds: Any, task_feature_lengths: Any) -> Any:
            def up(row: dict[str, Any]) -> dict[str, Any]:
                return {name: row[name] + 1 if name in _SIDES else row[name] for name in row}

            return super()._convert_features(ds.map(up), task_feature_lengths)

    return Shifting


def ids_of(batch: Batch, start: int) -> Batch:
    """Returns a `shifting` converter's batch with its ids and segment ids.

    `start` is the first decoder input of each example.
    """
    found = dict(batch)
    for name, tokens_WL in batch.items():
        if name.endswith("_tokens"):
            found[name] = np.maximum(tokens_WL - 1, 0)
    for side, name in (("encoder", "encoder_input_tokens"), ("decoder", "decoder_target_tokens")):
        if name in batch:
            is_token_WL = (batch[name] > 0).astype(np.int32)
            found.setdefault(f"{side}_segment_ids", is_token_WL)
    segments_WL = found["decoder_segment_ids"]
    begins_WL = np.diff(segments_WL, axis=1, prepend=0) != 0
    begins_WL[:, 0] = True
    found["decoder_input_tokens"][begins_WL & (segments_WL > 0)] = start
    return found
