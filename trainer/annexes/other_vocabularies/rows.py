"""Maps the rows of a table for one vocabulary to the rows for another.

Pieces match by text: the bytes that a piece adds to a text, with its space. So `▁the` of
SentencePiece, `Ġthe` of byte-level BPE and `the` of WordPiece match, and so do `ing` and `##ing`.

    sentinels          by number
    special ids        by role: padding, EOS, BOS, unknown, and the decoder's start
    other special ones by name, such as [MASK]
    all others         by text
    new pieces         mean of the fewest old pieces that spell them (ties: the longest first
                       piece); failing that, of those that spell them with their initial space
                       removed or added: WordPiece has ` ,`, others have `,`
    the rest           mean of the rows of all old ids

Source: the mean of the old pieces is Gee et al. 2022, "Fast Vocabulary Transfer for Language Model
Compression" (arXiv:2402.09977), section 2; the mean of all is Hewitt 2021, "Initializing New Word
Embeddings for Pretrained Language Models": new ids take little probability from the old ones.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.vocabularies.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED
from tasks.vocabulary import TokenIds

# Fills `Rows.sources`; a line of only NONE stands for the mean of all old ids' rows.
NONE = -1
_ROLES = ("pad", "eos", "bos", "unk")


@dataclass(frozen=True)
class Rows:
    """The old rows that each new row averages."""

    sources: np.ndarray  # int32 [new rows, any], padded with NONE
    old_ids: int  # number of old ids; old rows beyond these are padding
    old_rows: int  # number of rows in the old table
    carried: int  # number of new ids that take the row of one old id
    spelled: int  # number of new ids that take the mean of the old pieces that spell them
    others: int  # number of new ids that take the mean of all
    dropped: int  # number of old ids whose rows no new id carries
    shared: int  # number of text pieces among the carried ids

    @property
    def unchanged(self) -> bool:
        """True if the new rows are exactly the old rows, in order."""
        return len(self.sources) == self.old_rows and self.begins_equal

    @property
    def begins_equal(self) -> bool:
        """True if each new id has the old row of the same number."""
        ids = self.carried + self.spelled + self.others
        first = self.sources[:ids]
        same = np.array_equal(first[:, 0], np.arange(ids)) and ids <= self.old_ids
        return bool(same and (first[:, 1:] == NONE).all())

    def __str__(self) -> str:
        how = f" ({self.spelled:,} as the mean of their old pieces, {self.others:,} of all)"
        made = f"{count:,} made{how}" if (count := self.spelled + self.others) else "0 made"
        return f"{self.carried:,} rows carried, {made}, {self.dropped:,} dropped"


class _Piece(NamedTuple):
    row: int
    name: str
    kind: int


class _Pieces:
    """Old pieces by name and by text."""

    def __init__(self, pieces: Iterable[tuple[_Piece, bytes]]):
        self._texts: dict[bytes, list[_Piece]] = {}
        self._names: dict[str, list[int]] = {}
        for piece, text in pieces:
            if piece.kind in (CONTROL, UNUSED) or not text:
                self._names.setdefault(piece.name, []).append(piece.row)
            else:
                self._texts.setdefault(text, []).append(piece)
        self._longest = max(map(len, self._texts), default=0)

    def named(self, token: int, name: str) -> int | None:
        """Returns the row of a special piece with this name, preferring `token` itself."""
        found = self._names.get(name, [])
        return token if token in found else next(iter(found), None)

    def of_text(self, token: int, name: str, kind: int, text: bytes) -> int | None:
        """Returns the row of the piece with this text; among several, the most similar."""
        found = self._texts.get(text)
        if not found:
            return None

        def unlike(piece: _Piece) -> tuple[bool, bool, bool, int]:
            of_other_kind = (piece.kind == BYTE) != (kind == BYTE)
            return of_other_kind, piece.name != name, piece.row != token, piece.row

        return min(found, key=unlike).row

    def spelling(self, text: bytes) -> list[int] | None:
        """Returns the rows of the fewest pieces that spell a text; None if impossible."""
        size, never = len(text), len(text) + 1
        # For each place: (fewest pieces that spell the rest, end of the first of these).
        best = [(never, 0)] * size + [(0, 0)]
        for start in reversed(range(size)):
            for end in range(min(size, start + self._longest), start, -1):
                count = best[end][0] + 1
                if count < best[start][0] and text[start:end] in self._texts:
                    best[start] = count, end
        if best[0][0] in (0, never):
            return None
        rows, start = [], 0
        while start < size:
            end = best[start][1]
            # A byte that duplicates another piece's text is hardly ever trained.
            same = self._texts[text[start:end]]
            rows.append(min(same, key=lambda piece: (piece.kind == BYTE, piece.row)).row)
            start = end
        return rows


def by_piece(old: TokenIds, new: TokenIds, old_rows: int, new_rows: int) -> Rows:
    """Returns the rows of `new` under the rules above; table rows beyond the ids are padding.

    Raises UserError if a table has too few rows, or the vocabularies share no piece of text.
    """
    roles = _same_roles(old, new)
    special = {getattr(old.special, role) for role in _ROLES}
    pieces = _Pieces(
        (_Piece(row, name, kind), text)
        for row, name, kind, text in _described(old)
        if row not in special
    )

    def carried(token: int, name: str, kind: int, text: bytes) -> int | None:
        number = new.size - 1 - token
        if token >= new.first_sentinel:
            return old.size - 1 - number if number < old.sentinels else None
        if token in roles:
            return roles[token]
        if kind in (CONTROL, UNKNOWN, UNUSED):
            return pieces.named(token, name)
        return pieces.of_text(token, name, kind, text)

    found = {token: carried(token, name, kind, text) for token, name, kind, text in _described(new)}
    rows = _made(found, new, pieces, (old.size, old_rows), new_rows)
    if not rows.shared:
        raise UserError("the vocabularies have no piece of text in common, so no row can be used")
    return rows


def by_map(id_map: Sequence[int | None], new: TokenIds, old_rows: int, new_rows: int) -> Rows:
    """Returns the rows of `new` according to the id_map.json of an extended or cut vocabulary.

    `id_map` has the new id of each old id, None if dropped. Raises UserError if it does not fit the
    tables and the vocabulary.
    """
    known = [number for number in id_map if number is not None]
    if not known:
        raise UserError("the map gives no old id a new one, so nothing would be carried over")
    if not all(type(number) is int and 0 <= number < new.size for number in known):
        raise UserError(f"the map has new ids that are not below {new.size}, the vocabulary's size")
    if len(set(known)) < len(known):
        raise UserError("the map gives two old ids the same new one")
    found: dict[int, int | None] = dict.fromkeys(range(new.size))
    found |= {number: row for row, number in enumerate(id_map) if number is not None}
    described = {token: (name, kind, text) for token, name, kind, text in _described(new)}
    special = {getattr(new.special, role) for role in _ROLES}
    pieces = _Pieces(
        (_Piece(row, *described[token][:2]), described[token][2])
        for token, row in found.items()
        if row is not None and token < new.first_sentinel and token not in special
    )
    return _made(found, new, pieces, (len(id_map), old_rows), new_rows)


def _same_roles(old: TokenIds, new: TokenIds) -> dict[int, int]:
    """Returns new id -> old id for each role that both vocabularies have."""
    found = {}
    for role in reversed(_ROLES):  # an id with several roles keeps the first
        mine, theirs = getattr(new.special, role), getattr(old.special, role)
        if mine is not None and theirs is not None:
            found[mine] = theirs
    # The decoder's start may double as another token: padding in T5, BOS in Llama. A padding row
    # can take the start's old row, because it is read for nothing else.
    start = new.special.start
    if start not in found or start not in (new.special.eos, new.special.bos, new.special.unk):
        found[start] = old.special.start
    return found


def _described(ids: TokenIds) -> Iterator[tuple[int, str, int, bytes]]:
    """Yields (id, name, kind, text) of every id; sentinels have no text."""
    names, kinds, texts = ids.pieces, ids.kinds, ids.texts
    for token in range(ids.size):
        if token >= min(ids.first_sentinel, len(names)):
            yield token, "", CONTROL, b""
        else:
            text = texts[token]
            encoded = text if isinstance(text, bytes) else text.encode("utf-8", "replace")
            yield token, names[token], kinds[token], encoded


def _made(
    found: dict[int, int | None],
    new: TokenIds,
    pieces: _Pieces,
    old: tuple[int, int],
    new_rows: int,
) -> Rows:
    old_ids, old_rows = old
    for ids, rows, which in ((old_ids, old_rows, "old"), (new.size, new_rows, "new")):
        if ids > rows:
            raise UserError(f"the {which} vocabulary has {ids:,} ids, but its table {rows:,} rows")
    lines: list[list[int]] = []
    spelled = shared = 0
    for token, _, kind, text in _described(new):
        row = found[token]
        of_text = bool(text) and kind not in (CONTROL, UNKNOWN, UNUSED)
        if row is not None:
            lines.append([row])
            shared += of_text and kind in (NORMAL, BYTE)
            continue
        toggled = text[1:] if text[:1] == b" " else b" " + text
        spelling = of_text and (pieces.spelling(text) or pieces.spelling(toggled))
        lines.append(spelling or [])
        spelled += bool(spelling)
    padding = itertools.cycle([[row] for row in range(old_ids, old_rows)] or [[]])
    lines += itertools.islice(padding, new_rows - new.size)
    sources = np.full((new_rows, max(1, *map(len, lines))), NONE, np.int32)
    for number, line in enumerate(lines):
        sources[number, : len(line)] = line
    used = [row for row in found.values() if row is not None]
    others, dropped = new.size - len(used) - spelled, old_ids - len(set(used))
    return Rows(sources, old_ids, old_rows, len(used), spelled, others, dropped, shared)
