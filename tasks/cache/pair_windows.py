"""Reads the windows of a cache for an objective: windows of texts, or pairs.

Dimensions: W windows, N tokens per window.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tasks.cache.manifest import CacheManifest, Shard
from tasks.cache.records import PairRecords
from tasks.cache.windows import Windows
from tasks.document_kind import SIDES, DocumentKind
from tasks.objectives import Lengths, Objective
from tasks.objectives.supervised import CUT
from tasks.terminal.command_line import UserError
from tasks.vocabulary import PAIR_BORDER

# Number of index rows to count at a time.
_INDEX_ROWS = 1 << 20


def longest_sides(shards: Sequence[Shard]) -> tuple[int, int]:
    """Returns the maximum numbers of input and of target ids per pair in `shards`, without EOS."""
    counts = [shard.pairs for shard in shards if shard.pairs]
    return (
        max((count.longest_inputs for count in counts), default=0),
        max((count.longest_targets for count in counts), default=0),
    )


class PairWindows(Windows):
    """The pairs of one split of a cache; a window is a pair: inputs, PAIR_BORDER, targets.

    `sides` are the maximum numbers of input and of target ids; the rest is cut off. Other arguments
    are as in `Windows`.
    """

    def __init__(
        self,
        sides: tuple[int, int],
        folder: str,
        manifest: CacheManifest,
        split: str,
        **reading: Any,
    ):
        super().__init__(folder, manifest, split, sum(sides) + 1, **reading)
        self._sides = sides
        self._longest = longest_sides(manifest.splits[split])

    def grow(self, shards: Sequence[Shard]) -> None:
        super().grow(shards)
        added = longest_sides(shards)
        self._longest = max(self._longest[0], added[0]), max(self._longest[1], added[1])

    def read(self, indices_W: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows_R, place_W = np.unique(np.asarray(indices_W, np.int64), return_inverse=True)
        rows, tokens_R, inputs_R = self._rows.read(rows_R)
        assert isinstance(rows, PairRecords)
        inputs_W = np.minimum(inputs_R[place_W], self._sides[0])
        targets_W = np.minimum((tokens_R - inputs_R)[place_W], self._sides[1])
        skips_W = np.zeros_like(inputs_W)
        lengths_W = inputs_W + 1 + targets_W
        column_N, border_W1 = np.arange(self.window_tokens), inputs_W[:, None]
        tokens_WN = np.zeros((len(lengths_W), self.window_tokens), np.int32)
        tokens_WN[column_N < border_W1] = rows.inputs(place_W, skips_W, inputs_W)
        tokens_WN[column_N == border_W1] = PAIR_BORDER
        on_targets_WN = (column_N > border_W1) & (column_N < lengths_W[:, None])
        tokens_WN[on_targets_WN] = rows.tokens(place_W, skips_W, targets_W)
        return tokens_WN, lengths_W

    def cut(self) -> tuple[int, int]:
        """Returns (pairs with a truncated side, tokens cut off); reads the index only if needed."""
        if self._longest[0] <= self._sides[0] and self._longest[1] <= self._sides[1]:
            return 0, 0
        pairs = tokens = 0
        for begin in range(0, len(self), _INDEX_ROWS):
            both, inputs = self._rows.sizes(begin, min(begin + _INDEX_ROWS, len(self)))
            over = np.maximum(inputs - self._sides[0], 0)
            over += np.maximum(both - inputs - self._sides[1], 0)
            pairs += int(np.count_nonzero(over))
            tokens += int(over.sum())
        return pairs, tokens

    def lengths(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the truncated lengths of inputs and targets of pairs [first, last), int64."""
        tokens, inputs = self._rows.sizes(first, last)
        return np.minimum(inputs, self._sides[0]), np.minimum(tokens - inputs, self._sides[1])


def open_windows(
    folder: str,
    manifest: CacheManifest,
    split: str,
    objective: Objective,
    lengths: Lengths,
    **reading: Any,
) -> Windows:
    """Returns the windows from which an objective makes examples of these lengths.

    `reading` has further arguments of `Windows`. Raises UserError if only one of the cache and the
    objective is for pairs, if a pair is too long, or as `Windows` does.
    """
    check_kind(folder, manifest, objective)
    if objective.unit is DocumentKind.TEXT:
        window = objective.window_tokens(lengths)
        return Windows(folder, manifest, split, window, **reading)
    refuse_longer(folder, manifest, objective, lengths)
    return PairWindows(objective.sides(lengths), folder, manifest, split, **reading)


def check_kind(folder: str, manifest: CacheManifest, objective: Objective) -> None:
    """Raises UserError unless the cache and the objective are both for texts or both for pairs."""
    held, read = manifest.plan.unit, objective.unit
    if held is read:
        return
    what, advice = "texts", "build a cache with --corpus='…?inputs=COLUMN&targets=COLUMN'"
    if held is DocumentKind.PAIR:
        what = "pairs of inputs and targets"
        advice = "use a task NAME_supervised, or build a cache of texts"
    raise UserError(f"{folder} holds {what}, but this objective reads {read.plural}: {advice}")


def refuse_longer(
    folder: str, manifest: CacheManifest, objective: Objective, lengths: Lengths
) -> None:
    """Raises UserError if a pair of a cache is too long for these lengths, and is not to be cut."""
    if objective.cuts_sides:
        return
    sides = objective.sides(lengths)
    every = [shard for shards in manifest.splits.values() for shard in shards]
    for side, longest, most in zip(SIDES, longest_sides(every), sides, strict=True):
        length = getattr(lengths, side)
        eos = length - most
        if longest > most:
            raise UserError(
                f"{folder} has {side} of up to {longest:,} tokens, but --lengths.{side}={length} "
                f"holds {most:,}{' and EOS' * eos}: set it to {longest + eos}, or cut longer ones "
                f"with --objective=too_long={CUT}"
            )


def row_windows(folder: str, manifest: CacheManifest, split: str, **reading: Any) -> Windows:
    """Returns the rows of a split as windows; arguments and errors are as in `Windows`."""
    if manifest.plan.unit is DocumentKind.TEXT:
        reading.setdefault("across_shards", False)  # each shard begins a new row
        return Windows(folder, manifest, split, manifest.plan.row_tokens, **reading)
    sides = longest_sides(manifest.splits.get(split, ()))
    return PairWindows(sides, folder, manifest, split, **reading)
