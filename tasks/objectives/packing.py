"""Packs examples into rows by a plan made once per run.

The lengths of examples are known before tokens are read. A deck is a group of consecutive windows
with kinds of examples in the objective's proportions, and a plan that puts them into a fixed number
of rows. So rows need no index, and every window is read once.

Dimensions: G windows per deck, R rows per deck.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from tasks.objectives.noise import Array
from tasks.objectives.objective import Examples, Kind, Lengths, Objective, Slots
from tasks.terminal.command_line import UserError
from tasks.vocabularies.token_ids import TokenIds

# Maximum windows per deck; shares of kinds that no deck has exactly are rounded to 1 / _MOST.
_MOST = 400


@dataclasses.dataclass(frozen=True)
class InSlot(Objective):
    """An objective applied to the window of one slot of a packed row."""

    objective: Objective
    slot: Slots

    @property
    def features(self) -> tuple[str, ...]:
        return self.objective.features

    def window_tokens(self, lengths: Lengths) -> int:
        return self.objective.window_tokens(lengths)

    def sentinels(self, lengths: Lengths) -> int:
        return self.objective.sentinels(lengths)

    def examples(
        self, tokens_WN: Array, lengths_W: Array, keys_W: Array, lengths: Lengths, ids: TokenIds
    ) -> Examples:
        return self.objective.packed_examples(tokens_WN, lengths_W, keys_W, self.slot, lengths, ids)

    def describe(self, key: np.integer | Array) -> str:
        return self.objective.describe_choice(key, int(self.slot.choices_W[0]))


@dataclasses.dataclass(frozen=True)
class Deck:
    """The plan of a group of windows."""

    choices_G: Array  # int64 [G], the kind of each slot's example; slots are in row order
    mirrored_G: Array  # bool [G], True if the example mirrors the previous slot's
    firsts_R1: Array  # int64 [R + 1], the first slot of each row, then G
    filled: tuple[float, float]  # shares of positions that hold tokens, in inputs and in targets

    @property
    def windows(self) -> int:
        return len(self.choices_G)

    @property
    def rows(self) -> int:
        return len(self.firsts_R1) - 1


@functools.lru_cache(maxsize=32)
def deck(kinds: tuple[Kind, ...], rows: Lengths, together: bool) -> Deck:
    """Returns the deck of at most _MOST windows with the fullest rows.

    `together` means that inputs and targets share one sequence of both lengths, as in a decoder.
    Raises UserError if an example does not fit into a row.
    """
    kinds = tuple(kind for kind in kinds if kind.share)
    for kind in kinds:
        if not _fits(kind, rows.inputs, rows.targets, together):
            words = "examples have" if kind.members == 1 else "two examples per row have"
            raise UserError(
                f"rows of {rows.inputs} inputs and {rows.targets} targets are too short to pack: "
                f"{words} {kind.inputs} and {kind.targets}; make --lengths longer, or examples "
                "shorter with --data.example_inputs and --data.example_targets"
            )
    step = _exact_size(kinds)
    sizes = range(step, _MOST + 1, step) if step else [_MOST]
    return max(
        (_deck(kinds, size, rows, together) for size in sizes),
        key=lambda made: (min(made.filled), -made.windows),
    )


def _fits(kind: Kind, inputs: int, targets: int, together: bool) -> bool:
    if together:
        return kind.inputs + kind.targets <= inputs + targets
    return kind.inputs <= inputs and kind.targets <= targets


def _counts(kinds: Sequence[Kind], size: int) -> Array:
    """Returns the unrounded number of windows per kind, float64 [kinds]."""
    shares = np.array([kind.share for kind in kinds])
    return shares / shares.sum() * size


def _exact_size(kinds: Sequence[Kind]) -> int:
    """Returns the smallest deck size with exact shares, 0 if it exceeds _MOST."""
    members = np.array([kind.members for kind in kinds])
    for size in range(1, _MOST + 1):
        units = _counts(kinds, size) / members
        if np.allclose(units, np.rint(units), rtol=0, atol=1e-9):
            return size
    return 0


def _deck(kinds: Sequence[Kind], size: int, rows: Lengths, together: bool) -> Deck:
    """Returns a deck of about `size` windows; integer arithmetic makes it the same everywhere."""
    members = np.array([kind.members for kind in kinds])
    left = np.maximum(np.rint(_counts(kinds, size) / members).astype(np.int64), 1).tolist()
    choices, mirrored, firsts = [], [], [0]
    totals = [
        sum(n * getattr(kind, side) for n, kind in zip(left, kinds, strict=True))
        for side in ("inputs", "targets")
    ]
    need = list(totals)
    while any(left):
        room = [rows.inputs, rows.targets]
        while fitting := [
            number
            for number, kind in enumerate(kinds)
            if left[number] and _fits(kind, room[0], room[1], together)
        ]:
            merits = [_merit(kinds[number], room, need, rows, together) for number in fitting]
            number = fitting[int(np.argmax(merits))]  # the first of the best
            kind = kinds[number]
            left[number] -= 1
            for side, length in enumerate((kind.inputs, kind.targets)):
                room[side] -= length
                need[side] -= length
            choices += [kind.choice] * kind.members
            mirrored += [False, True][: kind.members]
        firsts.append(len(choices))
    sizes = [rows.inputs, rows.targets]
    if together:
        totals, sizes = [sum(totals)] * 2, [sum(sizes)] * 2
    filled = [total / (len(firsts[1:]) * size) for total, size in zip(totals, sizes, strict=True)]
    slots = np.array(choices, np.int64), np.array(mirrored, bool), np.array(firsts, np.int64)
    return Deck(*slots, (filled[0], filled[1]))


def _merit(
    kind: Kind, room: Sequence[int], need: Sequence[int], rows: Lengths, together: bool
) -> int:
    """Scores how well a kind suits the room left in a row.

    Large kinds score high, and so do kinds that leave room in proportion to the remaining `need`.
    """
    if together:
        return kind.inputs + kind.targets
    inputs, targets = room[0] - kind.inputs, room[1] - kind.targets
    size = kind.inputs * rows.targets + kind.targets * rows.inputs
    return size - 10 * abs(inputs * need[1] - targets * need[0])
