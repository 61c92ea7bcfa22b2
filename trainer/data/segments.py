"""Segments by document: tokens attend only to tokens of their own document.

Compared with windows without segments, only attention, positions and each document's first decoder
input differ. A sentinel and its whole span belong to the document in which the span begins, so that
a document with targets always has a place in the inputs; an EOS at the end belongs to the last
document.

To find each token's document, examples are made a second time, with the same noise keys, from
windows that hold document numbers instead of tokens.

Dimensions: W windows, N tokens of a window or feature, L positions of a feature.
"""

from collections.abc import Callable

import numpy as np

from tasks.document_kind import DocumentKind
from tasks.objectives import Examples, Lengths, Objective, noise
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from trainer.data.features import Batch, Converter, FeatureConverter

# Windows -> their examples.
Make = Callable[[np.ndarray], Examples]


class Unsegmented(UserError):
    """The rows of a task cannot have segments by document."""


def check(objective: Objective, lengths: Lengths, converter: Converter) -> None:
    """Raises Unsegmented if rows of an objective's examples cannot have segments by document."""
    if not isinstance(converter, FeatureConverter) or objective.unit is DocumentKind.PAIR:
        why = "it is only for texts, and for models with a decoder"
    elif "inputs" not in objective.features:
        return
    elif not converter.encoder_decoder:
        why = "inputs and targets of a decoder-only model share one sequence"
    elif not objective.sentinels(lengths):
        why = "this objective's targets may come from documents without inputs"
    else:
        return
    raise Unsegmented(f"--data.segment_documents=true: {why}; leave it out")


def documents_of(
    make: Make, examples: Examples, documents_WN: np.ndarray, lengths_W: np.ndarray, ids: TokenIds
) -> dict[str, np.ndarray]:
    """Returns the document, from 1, at each position of "inputs" and "targets"; 0 at padding.

    `examples` is the result of `make` for the windows' tokens. `documents_WN`, int32 [W, N], holds
    each token's document number, from 0; `lengths_W`, int64 [W], the windows' lengths.
    """
    within_WN = noise.within(lengths_W, documents_WN.shape[1])
    marked = make(np.where(within_WN, ids.size + documents_WN, 0).astype(np.int32))
    found: dict[str, np.ndarray] = {}
    span_W1 = np.zeros((len(lengths_W), ids.size - ids.first_sentinel), np.int32)
    for name in ("targets", "inputs"):
        if name not in examples:
            continue
        tokens_WN, counts_W = examples[name]
        marks_WN = marked[name][0]
        shown_WN = noise.within(counts_W, tokens_WN.shape[1])
        own_WN = np.where(marks_WN >= ids.size, marks_WN - ids.size + 1, 0) * shown_WN
        is_sentinel_WN = (own_WN == 0) & (tokens_WN >= ids.first_sentinel) & shown_WN
        if name == "targets":
            filled_WN = _filled(own_WN, shown_WN)
            if is_sentinel_WN.any():
                rows, columns = np.nonzero(is_sentinel_WN)
                sentinels = tokens_WN[rows, columns] - ids.first_sentinel
                span_W1[rows, sentinels] = filled_WN[rows, columns]
                # After each sentinel, the document of its span's first token.
                at_WN = np.where(is_sentinel_WN, np.arange(tokens_WN.shape[1]), -1)
                last_WN = np.maximum.accumulate(at_WN, axis=1)
                of_span_WN = np.take_along_axis(filled_WN, np.maximum(last_WN, 0), axis=1)
                filled_WN = np.where((last_WN >= 0) & shown_WN, of_span_WN, filled_WN)
        else:
            rows, columns = np.nonzero(is_sentinel_WN)
            own_WN[rows, columns] = span_W1[rows, tokens_WN[rows, columns] - ids.first_sentinel]
            filled_WN = _filled(own_WN, shown_WN)
        found[name] = filled_WN.astype(np.int32)
    return found


def _filled(own_WN: np.ndarray, shown_WN: np.ndarray) -> np.ndarray:
    """Fills unknown documents (0) from the next known position, else the last, else with 1."""
    width = own_WN.shape[1]
    column_N = np.arange(width)
    next_WN = np.where(own_WN > 0, column_N, width)
    next_WN = np.flip(np.minimum.accumulate(np.flip(next_WN, 1), axis=1), 1)
    before_WN = np.maximum.accumulate(np.where(own_WN > 0, column_N, -1), axis=1)
    place_WN = np.where(next_WN < width, next_WN, before_WN)
    taken_WN = np.take_along_axis(own_WN, np.maximum(place_WN, 0), axis=1)
    return np.where(place_WN >= 0, taken_WN, 1) * shown_WN


def segmented(batch: Batch, of: dict[str, np.ndarray], converter: Converter) -> Batch:
    """Returns the features of a batch with segments and positions by document."""
    batch = dict(batch)
    for name, side in (("inputs", "encoder"), ("targets", "decoder")):
        if name not in of:
            continue
        tokens_WL = batch[f"{side}_{'input' if side == 'encoder' else 'target'}_tokens"]
        segment_WL = np.zeros(tokens_WL.shape, np.int32)
        width = min(tokens_WL.shape[1], of[name].shape[1])
        segment_WL[:, :width] = of[name][:, :width]
        column_L = np.arange(tokens_WL.shape[1])
        begins_WL = np.diff(segment_WL, axis=1, prepend=0) != 0
        first_WL = np.maximum.accumulate(np.where(begins_WL, column_L, 0), axis=1)
        batch[f"{side}_segment_ids"] = segment_WL
        batch[f"{side}_positions"] = ((column_L - first_WL) * (segment_WL > 0)).astype(np.int32)
        if side == "decoder":
            inputs_WL = batch["decoder_input_tokens"].copy()
            inputs_WL[begins_WL & (segment_WL > 0)] = converter.special.start
            batch["decoder_input_tokens"] = inputs_WL
    return batch
