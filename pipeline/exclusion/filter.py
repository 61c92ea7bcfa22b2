"""Removes listed documents from batches, and listed paragraphs from their texts."""

import functools
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.exclusion.lists import WHOLE, Entry, ExcludeList, base_id, copy_name, id_digests
from tasks.reading.corpus import is_place
from tasks.storage import files

# Added to the reason if every paragraph of a document is listed.
NOTHING_LEFT = ", every paragraph"


@functools.lru_cache(maxsize=8)
def opened(path: str) -> ExcludeList:
    """Opens a list; a remote one is copied to a temporary file, unlinked at once."""
    if not files.is_remote(path):
        return ExcludeList(files.local_path(path))
    handle, copy = tempfile.mkstemp()
    os.close(handle)
    try:
        files.copy(path, copy)
        return ExcludeList(copy, path)  # mapped: the bytes stay until the process ends
    finally:
        os.unlink(copy)


class Found(NamedTuple):
    """An entry of a list for a document: the list's number, the entry's, and the document's."""

    list: int
    entry: int
    row: int


class Filter:
    """The lists of a cache; `cut` counts the paragraphs removed."""

    def __init__(self, lists: Iterable[ExcludeList]):
        self._lists = list(lists)
        self.cut = 0

    @classmethod
    def of_cache(cls, folder: str, digests: Sequence[str]) -> "Filter":
        """Returns the filter of a cache's lists; raises a UserError for a damaged one."""
        return cls.of_files(files.join(folder, copy_name(sha256)) for sha256 in digests)

    @classmethod
    def of_files(cls, paths: Iterable[str]) -> "Filter":
        return cls(map(opened, paths))

    def __bool__(self) -> bool:
        return bool(self._lists)

    def __call__(
        self, batch: pa.RecordBatch, quarantine: Callable[[str, str, str], None]
    ) -> pa.RecordBatch:
        """Returns a batch without listed documents; passes id, place and reason to `quarantine`."""
        names = [name or "" for name in batch.column("id").to_pylist()]
        parts = batch.column("part").to_pylist()
        found = self._found(names, parts, batch)
        if not found:
            return batch
        kept = np.ones(batch.num_rows, bool)
        texts: dict[int, str] = {}
        for row, entries in found.items():
            reason = next((entry.reason for entry in entries if entry.paragraph == WHOLE), None)
            if reason is None:
                text = batch.column("text")[row].as_py()
                if text is None:  # quarantined as null, but has the id of a listed document
                    continue
                cut = {entry.paragraph for entry in entries}
                lines = enumerate(text.split("\n"))
                text = "\n".join(line for number, line in lines if number not in cut)
                self.cut += len(cut)
                if text.strip():
                    texts[row] = text
                    continue
                reason = entries[0].reason + NOTHING_LEFT
            kept[row] = False
            quarantine(names[row], batch.column("place")[row].as_py(), reason)
        if texts:
            place = batch.schema.get_field_index("text")
            old = batch.column(place)
            values = [texts.get(row, value) for row, value in enumerate(old.to_pylist())]
            batch = batch.set_column(place, "text", pa.array(values, old.type))
        return batch if kept.all() else batch.filter(kept)

    def without(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._lists:
            return batch
        names = [name or "" for name in batch.column("id").to_pylist()]
        found = self._found(names, batch.column("part").to_pylist(), batch)
        kept = np.ones(batch.num_rows, bool)
        for row, entries in found.items():
            kept[row] = all(entry.paragraph != WHOLE for entry in entries)
        return batch.filter(kept)

    def _found(
        self, names: list[str], parts: list[int], batch: pa.RecordBatch
    ) -> dict[int, list[Entry]]:
        bases = [base_id(name, part) for name, part in zip(names, parts, strict=True)]
        digests = id_digests(bases)
        later = [row for row, part in enumerate(parts) if part > 1]
        own = dict(zip(later, id_digests(names[row] for row in later), strict=True))
        found: dict[int, list[Entry]] = {}
        for each in self._lists:
            rows = set(each.hits(digests).tolist())
            if later:
                of_parts = np.stack([own[row] for row in later])
                rows |= {later[place] for place in each.hits(of_parts).tolist()}
            for row in sorted(rows):
                place = batch.column("place")[row].as_py()
                entries = each.entries(digests[row], place)
                if parts[row] > 1:  # paragraphs are numbered within a part
                    entries = [entry for entry in entries if entry.paragraph == WHOLE]
                    entries += each.entries(own[row], place)
                if entries:
                    found.setdefault(row, []).extend(entries)
        return found

    def present(
        self, names: Sequence[str], left_out: Iterable[str], files_: Collection[str] = ()
    ) -> list[Found]:
        """Returns what lists say of a shard's documents as a whole, at any place.

        "ID#part2" is listed with ID if ID is in `names` or `left_out`, as all parts of a document
        are in one shard, or is a place in one of the corpus's `files_`, as blank parts are not
        kept. Otherwise it is a document of that name.
        """
        there = {*names, *left_out}
        bases = {row: base(name) for row, name in enumerate(names) if "#part" in name}
        parts = [row for row, name in bases.items() if name in there or is_place(name, files_)]
        found = self.found(names, [""] * len(names))
        of_bases = self.found([bases[row] for row in parts], [""] * len(parts))
        return found + [each._replace(row=parts[each.row]) for each in of_bases]

    def found(self, names: Sequence[str], places: Sequence[str]) -> list[Found]:
        """Returns the entries for whole documents, given their ids and places.

        A place "" leaves out entries for one of several documents of an id.
        """
        digests = id_digests(names)
        return [
            Found(number, entry.number, row)
            for number, each in enumerate(self._lists)
            for row in each.hits(digests).tolist()
            for entry in each.entries(digests[row], places[row])
            if entry.paragraph == WHOLE
        ]

    def reasons(self, names: Sequence[str]) -> dict[int, str]:
        """Returns index in `names` -> reason, for ids listed as whole documents at any place."""
        digests = id_digests(names)
        found: dict[int, str] = {}
        for each in self._lists:
            for row in each.hits(digests).tolist():
                for entry in each.entries(digests[row], ""):
                    if entry.paragraph == WHOLE:
                        found.setdefault(row, entry.reason)
        return found

    def paragraphs(self, names: Sequence[str], every_place: bool) -> dict[int, set[int]]:
        """Returns the listed paragraphs of documents, by index in `names`.

        `every_place` includes entries for just one of several documents with the same id. An id
        that ends in #partN, whether of a part or of a document, has only entries with that very id.
        """
        lists = [each for each in self._lists if each.has_paragraphs]
        digests = id_digests(names if lists else [])
        found: dict[int, set[int]] = {}
        for each in lists:
            for row in each.hits(digests).tolist():
                entries = each.entries(digests[row], None if every_place else "")
                numbers = {entry.paragraph for entry in entries} - {WHOLE}
                if numbers:
                    found.setdefault(row, set()).update(numbers)
        return found

    def touches(self, names: Sequence[str]) -> bool:
        """Returns whether an entry is for one of the ids or, if it is of a part, its document."""
        digests = id_digests([*names, *sorted({base(name) for name in names} - {*names})])
        return any(
            each.entries(digests[row])
            for each in self._lists
            for row in each.hits(digests).tolist()
        )


def base(name: str) -> str:
    """Returns the id of a part's document; other ids are returned unchanged."""
    head, mark, number = name.rpartition("#part")
    return head if mark and number.isdigit() else name
