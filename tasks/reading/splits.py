"""Assigns the files and documents of a corpus to train and validation."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks import arrow
from tasks.reading.corpus import TRAIN, VALIDATION, CorpusSpec, Piece, SourceFile
from tasks.terminal.command_line import UserError

if TYPE_CHECKING:
    import pyarrow as pa

VALIDATION_NAMES = ("validation", "valid", "val", "dev")
# Source: the keywords of datasets/data_files.py, so that files and the Hub agree.
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(VALIDATION_NAMES, VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# Runs per document up to which joining runs of documents is faster than choosing each.
_RUNS = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class ChosenFile:
    """A file to read and its splits; with `held_out`, a hash of the document id decides."""

    file: SourceFile
    splits: tuple[str, ...]
    held_out: bool


def split_of(name: str) -> str:
    """Returns the split named by the innermost split word in a path; train by default."""
    for component in reversed(name.lower().split("/")):
        for word in re.findall(r"[^-._ 0-9]+", component):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return TRAIN


def held_out_splits(spec: CorpusSpec) -> tuple[tuple[str, ...], bool]:
    """Returns (train files' splits, True if a hash decides) if there are no validation files."""
    if spec.split == VALIDATION:
        if not spec.validation:
            raise UserError(f"corpus {spec} has no validation, and validation=0 holds nothing out")
        return (VALIDATION,), True
    return ((TRAIN, VALIDATION), True) if spec.validation else ((TRAIN,), False)


def _choose(spec: CorpusSpec, found: list[SourceFile]) -> list[ChosenFile]:
    """Returns the files of the wanted split, then the validation files."""
    own = [ChosenFile(file, (VALIDATION,), False) for file in found if file.split == VALIDATION]
    if own and spec.split == VALIDATION:
        return own
    source = TRAIN if spec.split in ("", VALIDATION) else spec.split
    splits, held_out = ((TRAIN,), False) if own else held_out_splits(spec)
    chosen = [ChosenFile(file, splits, held_out) for file in found if file.split == source]
    if not chosen:
        names = ", ".join(sorted({file.split for file in found}))
        raise UserError(f"corpus {spec} has no split {source}; it has {names}: add ?split=NAME")
    return [*chosen, *own]


def generations(
    spec: CorpusSpec, found: list[SourceFile], earlier: Sequence[Sequence[str]]
) -> list[list[ChosenFile]]:
    """Returns the files to read by generation: first those in `earlier`, then the new ones.

    An extended cache has one generation of files per build. If a file in `earlier` is gone, all
    files form one generation. Raises UserError if new files would move earlier documents between
    splits.
    """
    chosen = _choose(spec, found)
    known = {name: number for number, names in enumerate(earlier) for name in names}
    if not known or not known.keys() <= {file.name for file in found}:
        return [chosen]
    before = _choose(spec, [file for file in found if file.name in known])
    if before != [each for each in chosen if each.file.name in known]:
        raise UserError(
            f"corpus {spec}: with the new files, documents of the old ones would move between "
            "train and validation; build a new cache in another --cache_dir"
        )
    found_in: list[list[ChosenFile]] = [[] for _ in range(len(earlier) + 1)]
    for each in chosen:
        found_in[known.get(each.file.name, -1)].append(each)
    return found_in if found_in[-1] else found_in[:-1]


def notes(found: list[SourceFile], chosen: list[ChosenFile], by_words: bool) -> list[str]:
    """Returns messages about files that are not read, or are read in an unexpected way."""
    lines = []
    asked = [each for each in chosen if not each.held_out and each.splits == (VALIDATION,)]
    if asked and len(asked) < len(chosen):
        size = sum(each.file.bytes for each in asked)
        amount = _amount(len(asked), size)
        lines.append(f"read as validation: {amount}, and no documents are held out")
    for split, (count, size) in left_out(found, chosen).items():
        amount = _amount(count, size)
        lines.append(f"not read: {amount} of the split {split}; ?split={split} reads them")
    words = Counter(split_of(file.name) for file in found)
    del words[TRAIN]
    if words and not by_words:
        names = " or ".join(sorted(words))
        lines.append(
            f"read like all others: {_amount(words.total())} with {names} in their paths; "
            "?split=train would set them apart"
        )
    return lines


def left_out(found: list[SourceFile], chosen: list[ChosenFile]) -> dict[str, tuple[int, int]]:
    """Returns (number, bytes) of the unread files, by split."""
    read = {each.file.name for each in chosen}
    unread = [file for file in found if file.name not in read]
    sizes = {
        split: [file.bytes for file in unread if file.split == split]
        for split in sorted({file.split for file in unread})
    }
    return {split: (len(each), sum(each)) for split, each in sizes.items()}


def _amount(count: int, size: int | None = None) -> str:
    amount = f"{count:,} {'file' if count == 1 else 'files'}"
    return amount if size is None else f"{amount} ({size / 1e6:,.1f} MB)"


def divide(
    piece: Piece, validation: float, batch: "pa.RecordBatch"
) -> Iterator[tuple[str, "pa.RecordBatch"]]:
    """Yields (split, its documents in a batch). All parts of a document go to the same split.

    `validation` is the share of documents to hold out if a hash decides.
    """
    if not piece.held_out:
        yield piece.splits[0], batch
        return
    # A document is held out if the first eight bytes of its hash, as a number, are below this.
    share = int(validation * 2**64).to_bytes(8)
    sha256 = _sha256()
    held = np.array([sha256(id).digest() < share for id in _base_ids(batch)], bool)
    for split in piece.splits:
        rows = held if split == VALIDATION else ~held
        if rows.any():
            yield split, batch if rows.all() else _rows(batch, rows)


@functools.cache
def _sha256() -> Any:
    """Returns the constructor of SHA-256 that takes a third of the time of OpenSSL's on an id."""
    for name in ("_sha2", "_sha256"):  # CPython's own, since 3.12 and before
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).sha256
    return hashlib.sha256


def _base_ids(batch: "pa.RecordBatch") -> list[bytes]:
    """Returns document ids as UTF-8, the same for all parts of one document."""
    ids, parts = batch.column("id").cast("binary").to_pylist(), arrow.numbers(batch.column("part"))
    for row in np.flatnonzero(parts > 1).tolist():
        ids[row] = ids[row].removesuffix(f"#part{parts[row]}".encode())
    return ids


def _rows(batch: "pa.RecordBatch", rows: np.ndarray) -> "pa.RecordBatch":
    import pyarrow as pa

    runs = np.flatnonzero(np.diff(rows, prepend=False, append=False)).reshape(-1, 2).tolist()
    if len(runs) > _RUNS * len(rows):
        return batch.filter(arrow.of_mask(rows))
    return pa.concat_batches([batch.slice(begin, end - begin) for begin, end in runs])
