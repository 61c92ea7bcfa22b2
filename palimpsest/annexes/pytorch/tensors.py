"""The features of a batch under the names and in the shapes of transformers' models.

Dimensions: B rows, L positions (Q of queries, K of keys), T tokens of all rows without padding, S
segments of all rows.
"""

from collections.abc import Callable, Mapping

import numpy as np

from tasks.terminal.command_line import UserError
from trainer.data.features import Batch, target_side, token_places

IGNORED = -100  # a label without loss


def as_features(batch: Batch) -> Batch:
    """Returns the batch as it is, with T5X's names."""
    return batch


def for_transformers(batch: Batch) -> Batch:
    """Returns the arguments of a model of transformers, with `labels`.

    Ids and 2-D masks are int64 [B, L], labels are -100 where there is no loss:

    - encoder-decoder (T5): input_ids, attention_mask, decoder_input_ids, labels. Packed rows have
      4-D masks [B, 1, Q, K] instead: attention_mask, decoder_attention_mask and
      cross_attention_mask, which `seq2seq` passes on;
    - decoder (Llama, GPT): input_ids, which begin with the first id that the decoder reads, labels
      for models that shift them, shift_labels for losses that take shifted ones, attention_mask.
      Packed rows also have position_ids and, like prefixes seen in both directions, a 4-D mask;
      transformers would infer segments from position_ids only with use_cache=False;
    - encoder (BERT): input_ids, attention_mask, token_type_ids, labels, and next_sentence_label
      [B], 1 if the segments were swapped.

    A 4-D mask is float32: 0 where a query sees a key, the lowest number elsewhere.
    """
    if target_side(batch) == "encoder":
        return _masked_lm(batch)
    return (_encoder_decoder if "encoder_input_tokens" in batch else _decoder)(batch)


def flat(batch: Batch) -> Batch:
    """Returns a decoder's rows as one row of all tokens, for kernels of flash attention.

    input_ids, labels, shift_labels and position_ids are int64 [1, T]; cu_seq_lens_q and
    cu_seq_lens_k, int32 [S + 1], are the ends of the segments, and max_length_q and max_length_k,
    int64 [], the length of the longest. Raises UserError for other models, and for prefixes seen in
    both directions.
    """
    if "decoder_target_tokens" not in batch or "encoder_input_tokens" in batch:
        raise UserError("form=flat is for a decoder: choose form=transformers")
    if "decoder_causal_attention" in batch:
        raise UserError("form=flat: prefixes are seen in both directions: use form=transformers")
    is_token_BL = token_places(batch, "decoder") > 0
    position_BL = _positions(batch)
    ends = np.flatnonzero(position_BL[is_token_BL] == 0)
    ends = np.append(ends, int(is_token_BL.sum())).astype(np.int32)
    longest = np.array(np.diff(ends).max(initial=0), np.int64)
    inputs_BL, labels_BL = batch["decoder_input_tokens"], _labels(batch, "decoder")
    shifted = {"input_ids": inputs_BL, "shift_labels": labels_BL, "position_ids": position_BL}
    made = {name: each[is_token_BL][None].astype(np.int64) for name, each in shifted.items()}
    return {
        **made, "labels": _unshifted(made["shift_labels"]),
        "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest,
        "max_length_k": longest,
    }  # fmt: skip


FORMS: Mapping[str, Callable[[Batch], Batch]] = {
    "transformers": for_transformers,
    "flat": flat,
    "features": as_features,
}


def _labels(batch: Batch, side: str) -> np.ndarray:
    tokens, weights = batch[f"{side}_target_tokens"], batch[f"{side}_loss_weights"]
    return np.where(weights > 0, tokens, IGNORED).astype(np.int64)


def _unshifted(labels_BL: np.ndarray) -> np.ndarray:
    """Returns labels for a model that compares position i with label i + 1."""
    return np.pad(labels_BL[:, :-1], ((0, 0), (1, 0)), constant_values=IGNORED)


def _positions(batch: Batch) -> np.ndarray:
    tokens_BL = batch["decoder_target_tokens"]
    counted_BL = np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape)
    return batch.get("decoder_positions", counted_BL)


def _additive(seen_BQK: np.ndarray) -> np.ndarray:
    """Returns the mask that attention adds to its logits, float32 [B, 1, Q, K]."""
    lowest = np.finfo(np.float32).min
    return np.where(seen_BQK, np.float32(0), lowest)[:, None]


def _same(segments_BQ: np.ndarray, segments_BK: np.ndarray) -> np.ndarray:
    return segments_BQ[:, :, None] == segments_BK[:, None, :]


def _causal(batch: Batch) -> np.ndarray:
    """Returns which keys the decoder's queries see, bool [B, Q, K]."""
    places_BL = token_places(batch, "decoder")
    length = places_BL.shape[1]
    seen_BQK = np.broadcast_to(np.tri(length, dtype=bool), (len(places_BL), length, length))
    if "decoder_causal_attention" in batch:
        both_BL = batch["decoder_causal_attention"] > 0
        seen_BQK = seen_BQK | (both_BL[:, :, None] & both_BL[:, None, :])
    if "decoder_segment_ids" in batch:
        seen_BQK = seen_BQK & _same(places_BL, places_BL)
    return seen_BQK


def _encoder_decoder(batch: Batch) -> Batch:
    made = {
        "input_ids": batch["encoder_input_tokens"].astype(np.int64),
        "decoder_input_ids": batch["decoder_input_tokens"].astype(np.int64),
        "labels": _labels(batch, "decoder"),
    }
    if "encoder_positions" not in batch:
        is_token_BL = token_places(batch, "encoder") > 0
        return {**made, "attention_mask": is_token_BL.astype(np.int64)}
    inputs_BK, targets_BQ = batch["encoder_segment_ids"], batch["decoder_segment_ids"]
    return {
        **made,
        "attention_mask": _additive(_same(inputs_BK, inputs_BK)),
        "decoder_attention_mask": _additive(_causal(batch)),
        "cross_attention_mask": _additive(_same(targets_BQ, inputs_BK)),
    }


def _decoder(batch: Batch) -> Batch:
    shifted_BL = _labels(batch, "decoder")
    made = {
        "input_ids": batch["decoder_input_tokens"].astype(np.int64),
        "labels": _unshifted(shifted_BL),
        "shift_labels": shifted_BL,
    }
    if "decoder_positions" in batch:
        made["position_ids"] = _positions(batch).astype(np.int64)
    if {"decoder_positions", "decoder_causal_attention"} & batch.keys():
        return {**made, "attention_mask": _additive(_causal(batch))}
    return {**made, "attention_mask": (token_places(batch, "decoder") > 0).astype(np.int64)}


def _masked_lm(batch: Batch) -> Batch:
    return {
        "input_ids": batch["encoder_input_tokens"].astype(np.int64),
        "attention_mask": (token_places(batch, "encoder") > 0).astype(np.int64),
        "token_type_ids": batch["encoder_token_types"].astype(np.int64),
        "labels": _labels(batch, "encoder"),
        "next_sentence_label": batch["sentence_order"].astype(np.int64),
    }
