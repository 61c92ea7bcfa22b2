"""The first stage: reads a piece of the corpus and writes its units' signatures and keys.

A unit is a document or paragraph, numbered by its piece (upper 32 bits) and its index there, so in
corpus order. A document read in parts is one unit: its MinHash is the minimum over its parts, and
its exact hash is a hash of the parts' hashes. Shingles across part borders are missing.
"""

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annexes.deduplication import arrays, contamination, kernels
from pipeline.annexes.deduplication.plan import PARAGRAPH, PREFIXES, SIGNATURES, Job, Rules
from pipeline.exclusion.filter import Filter
from pipeline.exclusion.lists import base_id, id_digests, place_hash
from pipeline.runners import secret
from tasks.reading import sources

# Names of the `counts` in a piece's file.
COUNTS = ("documents", "text_bytes")


@dataclasses.dataclass
class Found:
    """Ordered units of a batch."""

    ids: list[str]  # document ids, with "#partN" only if units are paragraphs
    places: list[str]  # document places, "file:row" or "file:byte"
    paragraphs: np.ndarray  # int64, line numbers, -1 for documents
    parts: np.ndarray  # int32, numbers of the parts that paragraphs are in, 0 for documents
    continued: np.ndarray  # bool, true if the unit continues the previous one
    # sketches, exact, words: uint32[units, hashes], uint64[units, 2], int64[units].
    sketches: np.ndarray
    exact: np.ndarray
    words: np.ndarray
    grams: np.ndarray  # int64[found, 2] (unit, index of an evaluation n-gram)
    counts: Counter[str]


class Reader:
    """Makes units from batches."""

    def __init__(self, rules: Rules, grams: contamination.Grams | None):
        self._rules, self._grams = rules, grams
        self._words = contamination.Words()
        self._hashes = kernels.multipliers(rules.hashes)
        self._last = ""  # the last document

    def units(self, batch: pa.RecordBatch) -> Found:
        rules = self._rules
        data, bounds = contamination.text_bytes(batch)
        parts = batch.column("part").to_numpy()
        names, places = batch.column("id").to_pylist(), batch.column("place").to_pylist()
        documents = int((parts <= 1).sum())
        # A document whose first part is blank, and so left out, begins with a later one.
        later = np.flatnonzero(parts > 1).tolist()
        bases = {
            row: base_id(names[row], int(parts[row])) if row >= 0 else self._last
            for row in {*later, *(row - 1 for row in later), len(names) - 1}
        }
        documents += sum(bases[row] != bases[row - 1] for row in later)
        self._last = bases[len(names) - 1]
        if rules.unit == PARAGRAPH:
            texts, numbers, begins, ends = kernels.lines_of(data, bounds).T.copy()
            names = [names[row] for row in texts.tolist()]
            places = [places[row] for row in texts.tolist()]
            of_parts, continued = parts[texts], np.zeros(len(texts), bool)
        else:
            numbers, begins, ends = np.full(len(names), -1), bounds[:-1], bounds[1:]
            names = [base_id(name, part) for name, part in zip(names, parts.tolist(), strict=True)]
            of_parts, continued = np.zeros(len(names), np.int32), parts > 1
        words, word_bounds, exact = self._words(data, begins, ends)
        sketches = np.empty((len(begins), rules.hashes if rules.near else 0), np.uint32)
        if rules.near:
            factors = kernels.gram_factors(rules.shingle)
            kernels.minhash(words, word_bounds, rules.shingle, factors, *self._hashes, sketches)
        shared = np.zeros((0, 2), np.int64)
        if self._grams:
            shared = self._grams.shared(words, word_bounds, rules.ngram)
        counts = Counter(documents=documents, text_bytes=int((bounds[1:] - bounds[:-1]).sum()))
        found = sketches, exact, np.diff(word_bounds), shared, counts
        return Found(names, places, numbers, of_parts, continued, *found)


def write_piece(job: Job, element: tuple[int, str, sources.Piece]) -> Counter[str]:
    """Reads a piece, its (number, corpus, piece), and writes its file; returns metrics."""
    number, name, piece = element
    secret.provide_hf_token(job.hf_token_secret)
    grams = contamination.Grams.open(job.folder) if job.contaminated else None
    reader = Reader(job.rules, grams)
    # Not divided into splits, so that units keep corpus order.
    whole = dataclasses.replace(piece, held_out=False)
    kept = Filter.of_cache(job.folder, job.exclude.get(name, ()))
    batches = (kept.without(batch) for _, batch in sources.read(job.corpora[name], whole))
    found = [reader.units(batch) for batch in batches]
    joined = _joined(found, job.rules, file_names(piece), job.salt(name))
    arrays.write(job.path(SIGNATURES, number), joined)
    return Counter(pieces=1)


def file_names(piece: sources.Piece) -> list[str]:
    return list(dict.fromkeys(part.file.name for part in piece.parts))


def _joined(
    found: list[Found], rules: Rules, names_of_files: list[str], salt: np.uint64
) -> dict[str, np.ndarray]:
    """Returns the arrays of a piece.

    documents   high, low (digest of the id), places (hash of the place), file, row (the place
                itself), part, ids, id_bounds, members (JSON of the names of files in archives)
    units       owner (its document), paragraph, signatures (8 bits of each MinHash value)
    sorted      id_…, exact_…, band_…: sorted keys, their units or documents (…_rows), and the
                number of keys below each first byte (…_prefixes)
    grams       (unit, n-gram) of the evaluation sets
    """
    hashes = rules.hashes if rules.near else 0
    empty = Found(
        [], [], np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, bool),
        np.zeros((0, hashes), np.uint32),
        np.zeros((0, 2), np.uint64), np.zeros(0, np.int64), np.zeros((0, 2), np.int64), Counter(),
    )  # fmt: skip
    found = [empty, *found]
    ids = [name for each in found for name in each.ids]
    places = [place for each in found for place in each.places]
    paragraphs, parts, continued, sketches, exact, words = (
        np.concatenate([getattr(each, name) for each in found])
        for name in ("paragraphs", "parts", "continued", "sketches", "exact", "words")
    )
    if continued.any():  # unless the first part was blank, and so left out
        continued &= [False, *(one == other for one, other in itertools.pairwise(ids))]
    before = np.cumsum([0, *(len(each.ids) for each in found)])
    grams = np.concatenate([
        each.grams + np.array([start, 0]) for each, start in zip(found, before, strict=False)
    ])  # fmt: skip
    heads = np.flatnonzero(~continued)
    if len(heads) < len(ids):  # parts of long documents become one unit
        unit_of = np.cumsum(~continued) - 1
        sketches = np.minimum.reduceat(sketches, heads) if hashes else sketches[heads]
        exact = _chained(exact, heads)
        words = np.add.reduceat(words, heads)
        grams[:, 0] = unit_of[grams[:, 0]]
        paragraphs, parts = paragraphs[heads], parts[heads]
        ids, places = [ids[head] for head in heads], [places[head] for head in heads]
    first = np.ones(len(ids), bool)
    if rules.unit == PARAGRAPH and ids:
        named = zip(ids, places, strict=True)
        first[1:] = [pair != other for pair, other in itertools.pairwise(named)]
    owners = np.flatnonzero(first)
    names, places = [ids[owner] for owner in owners], [places[owner] for owner in owners]
    file, row, members = _located(places, names_of_files)
    digests = id_digests(names)
    encoded = [name.encode() for name in names]
    usable = np.flatnonzero(words >= (rules.min_words or 1))
    keys = kernels.band_keys(sketches[usable], rules.bands, rules.rows) if hashes else None
    return {
        "counts": np.array([sum(each.counts[name] for each in found) for name in COUNTS]),
        "high": digests[:, 0].copy(),
        "low": digests[:, 1].copy(),
        "places": np.array(list(map(place_hash, places)), np.uint64),
        "file": file,
        "row": row,
        "part": parts[owners].astype(np.int32),
        "members": np.frombuffer(json.dumps(members).encode(), np.uint8),
        "ids": np.frombuffer(b"".join(encoded), np.uint8),
        "id_bounds": np.cumsum([0, *map(len, encoded)]).astype(np.int64),
        "owner": (np.cumsum(first) - 1).astype(np.uint32),
        "paragraph": paragraphs.astype(np.int32),
        "signatures": sketches.astype(np.uint8),
        **_sorted("id", digests[None, :, 0] ^ salt, np.arange(len(names)), digests[:, 1]),
        **_sorted("exact", exact[None, usable, 0], usable, exact[usable, 1]),
        **(_sorted("band", keys, usable) if keys is not None else {}),
        "grams": np.unique(grams[np.isin(grams[:, 0], usable)], axis=0).astype(np.uint32),
    }


def _located(places: list[str], names: list[str]) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Returns (uint32 indices of files, uint64 rows) of places "file:row", and further files.

    An index counts `names`, then the further files, which are members of archives.
    """
    pairs = pc.split_pattern(pa.array(places, pa.string()), ":", max_splits=1, reverse=True)
    values = pairs.flatten()
    if not names or len(values) != 2 * len(places):  # not from files, as the built-in corpus
        return np.zeros(len(places), np.uint32), np.zeros(len(places), np.uint64), []
    numbers = np.arange(0, len(values), 2)
    of = values.take(pa.array(numbers))
    file, members = pc.index_in(of, pa.array(names, pa.string())), []
    if file.null_count:
        members = pc.unique(of.filter(pc.is_null(file))).to_pylist()
        file = pc.index_in(of, pa.array([*names, *members], pa.string()))
    rows = values.take(pa.array(numbers + 1)).cast(pa.uint64()).to_numpy()
    return file.to_numpy().astype(np.uint32), rows, members


def _chained(exact: np.ndarray, heads: np.ndarray) -> np.ndarray:
    """Returns uint64[heads, 2], a hash of the exact hashes from each head to the next."""
    out = exact[heads]
    ends = [*heads[1:].tolist(), len(exact)]
    for unit, (head, end) in enumerate(zip(heads.tolist(), ends, strict=True)):
        for part in exact[head + 1 : end]:
            factors = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
            out[unit] = out[unit] * factors ^ (part >> np.uint64(7)) ^ part
    return out


def _sorted(
    name: str, keys: np.ndarray, rows: np.ndarray, seconds: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Returns sorted keys [sets, n] with their rows and, for one set, second halves."""
    orders = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, orders, axis=1)
    marks = np.arange(PREFIXES, dtype=np.uint64) << np.uint64(56)
    prefixes = np.stack([np.searchsorted(each, marks) for each in ordered])
    ends = np.full((len(keys), 1), keys.shape[1])
    found = {
        f"{name}_keys": ordered,
        f"{name}_rows": rows[orders].astype(np.uint32),
        f"{name}_prefixes": np.concatenate([prefixes, ends], axis=1).astype(np.int64),
    }
    if seconds is not None:
        found[f"{name}_seconds"] = seconds[orders[0]]
    return found
