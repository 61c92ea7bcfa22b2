"""Rows of a table for one vocabulary, made of the rows for another.

A piece is its text: the bytes that it adds to a text, with its space. So `▁the` of SentencePiece,
`Ġthe` of byte-level BPE and `the` of WordPiece are one piece, and so are `ing` and `##ing`. Upper
and lower case are different pieces.

    sentinels          by number
    special ids        by role: padding, EOS, BOS, unknown, and what a decoder reads first
    other special ones by name, as [MASK]
    all others         by text
    new pieces         the mean of the old pieces that spell them: as few as possible, of equally
                       few those with the longest first piece; if none do, of those that spell them
                       without their space, or with one, as WordPiece has ` ,` and others `,`
    what is left       the mean of the rows of all old ids

Source: the mean of the old pieces is Gee et al. 2022, "Fast Vocabulary Transfer for Language Model
Compression" (arXiv:2402.09977), section 2, which cuts new pieces with the old tokenizer; here no
library is needed. The mean of all is Hewitt 2021, "Initializing New Word Embeddings for Pretrained
Language Models": new ids then take little probability from the old ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tasks.terminal.command_line import UserError
from tasks.vocabularies.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED
from tasks.vocabulary import TokenIds

# In `Rows.sources`: no further row; a line without any row is the mean of all old ids' rows.
NONE = -1
_ROLES = ("pad", "eos", "bos", "unk")


@dataclass(frozen=True)
class Rows:
    """The old rows whose mean is each new row.

    Attributes:
      sources: int32 [new rows, most], filled up with NONE; a line of NONE alone is the mean of the
        rows of all old ids.
      old_ids: number of old ids; old rows above are padding.
      old_rows: number of rows of the old table.
      carried: new ids that have the row of one old id.
      spelled: new ids that have the mean of the old pieces that spell them.
      others: new ids that have the mean of all.
      dropped: old ids whose rows no new id carries.
      shared: pieces of text among the carried ids.
    """

    sources: np.ndarray
    old_ids: int
    old_rows: int
    carried: int
    spelled: int
    others: int
    dropped: int
    shared: int

    @property
    def unchanged(self) -> bool:
        """True if each new row is the old row of the same number, and none is left out."""
        count = len(self.sources)
        return count == self.old_rows and self.begins_equal

    @property
    def begins_equal(self) -> bool:
        """True if each new id has the old row of the same number."""
        ids = self.carried + self.spelled + self.others
        first = self.sources[:ids]
        same = np.array_equal(first[:, 0], np.arange(ids)) and ids <= self.old_ids
        return bool(same and (first[:, 1:] == NONE).all())

    def __str__(self) -> str:
        made = self.spelled + self.others
        how = f" ({self.spelled:,} as the mean of their old pieces, {self.others:,} of all)"
        return (
            f"{self.carried:,} rows carried, {made:,} made{how if made else ''}, "
            f"{self.dropped:,} dropped"
        )


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
        """Returns the row of a special piece of this name, or of `token` itself if it is one."""
        found = self._names.get(name, [])
        return token if token in found else next(iter(found), None)

    def of_text(self, token: int, name: str, kind: int, text: bytes) -> int | None:
        """Returns the row of the piece with this text; of several the most alike."""
        found = self._texts.get(text)
        if not found:
            return None

        def unlike(piece: _Piece) -> tuple[bool, bool, bool, int]:
            of_other_kind = (piece.kind == BYTE) != (kind == BYTE)
            return of_other_kind, piece.name != name, piece.row != token, piece.row

        return min(found, key=unlike).row

    def spelling(self, text: bytes) -> list[int] | None:
        """Returns the rows of the fewest pieces that spell a text; None if none do."""
        size = len(text)
        best: list[tuple[int, int] | None] = [None] * size + [(0, 0)]
        for start in reversed(range(size)):
            for end in range(min(size, start + self._longest), start, -1):
                rest = best[end]
                if rest is None or text[start:end] not in self._texts:
                    continue
                here = best[start]
                if here is None or rest[0] + 1 < here[0]:
                    best[start] = (rest[0] + 1, end)
        if not size or best[0] is None:
            return None
        rows, start = [], 0
        while start < size:
            step = best[start]
            assert step is not None
            part = text[start : step[1]]
            # A byte with the text of another piece is hardly ever trained.
            found = min(self._texts[part], key=lambda piece: (piece.kind == BYTE, piece.row))
            rows.append(found.row)
            start = step[1]
        return rows


def by_piece(old: TokenIds, new: TokenIds, old_rows: int, new_rows: int) -> Rows:
    """Returns the rows of `new`, made of those of `old` by the rules above.

    Args:
      old: the vocabulary of the old table.
      new: the vocabulary of the new one.
      old_rows: rows of the old table, at least one for each id; those above are padding.
      new_rows: rows of the new table, likewise.

    Raises:
      UserError: a table has too few rows, or the vocabularies have no piece of text in common.
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
    """Returns the rows of `new` by the id_map.json of vocab.train --extend or vocab.trim.

    Args:
      id_map: the new id of each old id, None if it was dropped.
      new: the vocabulary of the new table.
      old_rows: rows of the old table, at least one for each old id.
      new_rows: rows of the new table, likewise.

    Raises:
      UserError: the map is not one of such tables and of this vocabulary.
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
    """Returns new id -> old id, of those with a role that both vocabularies have."""
    found = {}
    for role in reversed(_ROLES):  # an id with several roles has that of the first
        mine, theirs = getattr(new.special, role), getattr(old.special, role)
        if mine is not None and theirs is not None:
            found[mine] = theirs
    # A decoder's first input may have another role, as padding in T5 and BOS in Llama. Rows of
    # padding are never read otherwise.
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
    """Returns the rows, given the carried ones by new id; `old` is (ids, rows) of the old table."""
    old_ids, old_rows = old
    for ids, rows, which in ((old_ids, old_rows, "old"), (new.size, new_rows, "new")):
        if ids > rows:
            raise UserError(f"the {which} vocabulary has {ids:,} ids, its table {rows:,} rows")
    lines: list[list[int]] = []
    spelled = shared = 0
    for token, _, kind, text in _described(new):
        row = found[token]
        of_text = bool(text) and kind not in (CONTROL, UNKNOWN, UNUSED)
        if row is not None:
            lines.append([row])
            shared += of_text and kind in (NORMAL, BYTE)
            continue
        spelling = None
        if of_text:
            toggled = text[1:] if text[:1] == b" " else b" " + text
            spelling = pieces.spelling(text) or pieces.spelling(toggled)
        lines.append(spelling or [])
        spelled += bool(spelling)
    padding = range(old_ids, old_rows)
    lines += [
        [padding[number % len(padding)]] if padding else [] for number in range(new_rows - new.size)
    ]
    sources = np.full((new_rows, max(1, *map(len, lines))), NONE, np.int32)
    for number, line in enumerate(lines):
        sources[number, : len(line)] = line
    carried = sum(row is not None for row in found.values())
    used = {row for row in found.values() if row is not None}
    return Rows(
        sources,
        old_ids,
        old_rows,
        carried,
        spelled,
        new.size - carried - spelled,
        old_ids - len(used),
        shared,
    )
