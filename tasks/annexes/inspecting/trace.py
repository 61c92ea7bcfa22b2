"""Traces each token of an example to its position in the window, for any objective.

An objective is a pure function of tokens and keys, so it is called twice: with a window's tokens,
and with markers (ids above the vocabulary's) in their place. A marker in the result identifies a
token of the window; the objective added everything else.

Dimensions: N tokens of a window, L positions of a feature.
"""

import copy
import dataclasses

import numpy as np

from tasks.objectives import Lengths, Objective
from tasks.vocabulary import PAIR_BORDER, TokenIds

# Number of colours for a window whose tokens are all in the inputs, in a different order.
SHUFFLED_PARTS = 8


@dataclasses.dataclass(frozen=True)
class Side:
    """One feature of an example: int32 ids without padding, and two int64 numbers per token."""

    tokens_L: np.ndarray
    places_L: np.ndarray  # position in the window, -1 for tokens added by the objective
    spans_L: np.ndarray  # the span that the token belongs to or replaces, -1 for none


@dataclasses.dataclass(frozen=True)
class Trace:
    """The example that an objective makes from a window.

    A span is a run of tokens to predict: tokens missing from the inputs or, if there are weights,
    tokens with a weight in the loss. If the inputs are the reordered window, spans are eighths of
    the window.
    """

    window: Side
    inputs: Side | None
    targets: Side
    weights_L: np.ndarray | None  # int64 weights of the targets, None if all are in the loss
    more: dict[str, np.ndarray]  # further features, as the objective returns them, without padding
    used_N: np.ndarray  # bool, True for tokens of the window that are in the example
    shuffled: bool  # True if the inputs are the window in a different order
    exact: bool  # False if the objective does not accept markers; then all places are -1


def trace(
    objective: Objective,
    window_N: np.ndarray,
    key: np.integer | np.ndarray,
    lengths: Lengths,
    ids: TokenIds,
) -> Trace:
    """Traces the example made from an unpadded window, int32 [N], and a key."""
    made = _example(objective, window_N, key, lengths, ids)
    places = _places(objective, window_N, key, lengths, ids, made)
    exact = places is not None
    if places is None:
        places = {name: np.full(len(made[name]), -1, np.int64) for name in made}
    weights_L = made["weights"].astype(np.int64) if "weights" in made else None
    inputs_L = places.get("inputs", np.zeros(0, np.int64))
    targets_L = places["targets"]
    size = len(window_N)
    in_inputs_N, in_targets_N = _members(inputs_L, size), _members(targets_L, size)
    learned_N = in_targets_N & ~in_inputs_N
    if weights_L is not None:
        learned_N = _members(targets_L[weights_L > 0], size)
    elif "inputs" not in made:
        learned_N[:] = False
    shuffled = not learned_N.any() and bool((np.diff(inputs_L[inputs_L >= 0]) < 0).any())
    starts_N = learned_N.copy()
    starts_N[1:] &= ~learned_N[:-1]
    spans_N = np.where(learned_N, np.cumsum(starts_N) - 1, -1)
    if shuffled:
        spans_N = np.arange(size) * SHUFFLED_PARTS // max(size, 1)

    inputs, spans_L = None, _spans_of(targets_L, spans_N)
    if "inputs" in made:
        hidden_N = np.where(in_inputs_N, -1, spans_N)
        replaced_L = _replaced_spans(made["inputs"], inputs_L, targets_L, hidden_N, ids)
        inputs_spans_L = np.where(inputs_L >= 0, _spans_of(inputs_L, spans_N), replaced_L)
        inputs = Side(made["inputs"], inputs_L, inputs_spans_L)
        spans_L = _with_sentinels(made["targets"], targets_L, spans_L, inputs)
    known = ("inputs", "targets", "weights")
    return Trace(
        Side(window_N, np.arange(size), spans_N),
        inputs,
        Side(made["targets"], targets_L, spans_L),
        weights_L,
        {name: values for name, values in made.items() if name not in known},
        (in_inputs_N | in_targets_N | (window_N == PAIR_BORDER)) if exact else np.ones(size, bool),
        shuffled,
        exact,
    )


def _example(
    objective: Objective,
    window_N: np.ndarray,
    key: np.integer | np.ndarray,
    lengths: Lengths,
    ids: TokenIds,
) -> dict[str, np.ndarray]:
    window_1N, lengths_1 = window_N[None].astype(np.int32), np.array([len(window_N)], np.int64)
    keys_1 = np.array([key], np.uint64)
    examples = objective.examples(window_1N, lengths_1, keys_1, lengths, ids)
    return {name: values_WL[0, : counts_W[0]] for name, (values_WL, counts_W) in examples.items()}


def _places(
    objective: Objective,
    window_N: np.ndarray,
    key: np.integer | np.ndarray,
    lengths: Lengths,
    ids: TokenIds,
    made: dict[str, np.ndarray],
) -> dict[str, np.ndarray] | None:
    """Returns feature -> int64 [L] places; None if the objective treats markers unlike tokens."""
    markers_N = ids.size + np.arange(len(window_N), dtype=np.int32)
    markers_N[window_N == PAIR_BORDER] = PAIR_BORDER
    # Objectives may ask which tokens begin a word: a marker does if the window's token does.
    words_N = ids.word_starts[window_N]
    words_N[1:] |= window_N[:-1] == ids.special.eos
    with_markers = copy.copy(ids)
    vars(with_markers)["word_starts"] = np.concatenate([ids.word_starts, words_N])
    vars(with_markers)["text_ids"] = np.concatenate([ids.text_ids, window_N])
    try:
        found = _example(objective, markers_N, key, lengths, with_markers)
    except (IndexError, ValueError):  # a user's objective that depends on more than that
        return None
    places: dict[str, np.ndarray] = {}
    for name in ("inputs", "targets"):
        if name not in made:
            continue
        places_L = np.where(found[name] >= ids.size, found[name].astype(np.int64) - ids.size, -1)
        if len(places_L) != len(made[name]):
            return None
        same_L = np.where(places_L >= 0, window_N[places_L], found[name]) == made[name]
        if not same_L.all():
            return None
        places[name] = places_L
    return places


def _members(places_L: np.ndarray, size: int) -> np.ndarray:
    found_N = np.zeros(size, bool)
    found_N[places_L[places_L >= 0]] = True
    return found_N


def _spans_of(places_L: np.ndarray, spans_N: np.ndarray) -> np.ndarray:
    if not len(spans_N):
        return np.full(len(places_L), -1)
    return np.where(places_L >= 0, spans_N[places_L], -1)


def _replaced_spans(
    tokens_L: np.ndarray,
    places_L: np.ndarray,
    targets_L: np.ndarray,
    hidden_N: np.ndarray,
    ids: TokenIds,
) -> np.ndarray:
    """Returns the hidden span that each token added by the objective replaces, int64 [L], or -1.

    `hidden_N` numbers the spans of the window that are missing from the inputs.
    """
    eos = ids.special.eos
    replaced_L = np.full(len(tokens_L), -1)
    added_L = np.flatnonzero((places_L < 0) & (tokens_L != eos))
    if (
        len(places_L) == len(targets_L)
        and ((places_L == targets_L) | (places_L < 0) | (targets_L < 0)).all()
    ):
        # Tokens are replaced in place.
        replaced_L[added_L] = _spans_of(targets_L[added_L], hidden_N)
        return replaced_L
    # The hidden span begins after the token to the left, or ends before the token to the right.
    size = len(hidden_N)
    known = np.flatnonzero((places_L >= 0) | (tokens_L == eos))
    beside = [-1, *places_L[known].tolist(), -1]
    for at, following in zip(added_L.tolist(), np.searchsorted(known, added_L), strict=True):
        left, right = beside[following], beside[following + 1]
        for place in (left + 1 if left >= 0 else size, right - 1 if right >= 0 else -1):
            if replaced_L[at] < 0 and 0 <= place < size:
                replaced_L[at] = hidden_N[place]
    return replaced_L


def _with_sentinels(
    tokens_L: np.ndarray, places_L: np.ndarray, spans_L: np.ndarray, inputs: Side
) -> np.ndarray:
    """Returns the targets' spans, including sentinels.

    A token that replaces exactly one span in the inputs belongs to that span in the targets too.
    """
    replaced: dict[int, set[int]] = {}
    added_L = inputs.places_L < 0
    for token, span in zip(
        inputs.tokens_L[added_L].tolist(), inputs.spans_L[added_L].tolist(), strict=True
    ):
        replaced.setdefault(token, set()).add(span)
    spans_L = spans_L.copy()
    for at, token in enumerate(tokens_L.tolist()):
        if places_L[at] < 0 and len(replaced.get(token, ())) == 1:
            spans_L[at] = next(iter(replaced[token]))
    return spans_L
