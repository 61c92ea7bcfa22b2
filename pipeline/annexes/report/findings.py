"""Statistics of a cache that require reading rows, from a sample of shards."""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Iterator

import numpy as np

from tasks.cache.manifest import CacheManifest, shard_file
from tasks.reading.corpus import file_of
from tasks.storage import files
from tasks.terminal import progress
from tasks.vocabulary import Vocabulary

_EXAMPLES = 3  # documents shown per quarantine reason, and rows shown in full
_TOP_DUPLICATES = 8
_START_TOKENS = 24  # tokens to show from a repeated document
_WORD_TOKENS = 200_000  # tokens decoded to count words


@dataclasses.dataclass(frozen=True)
class DuplicateGroup:
    """Documents with equal tokens: their number, some ids, and the start of their text."""

    count: int
    ids: list[str]
    start: str


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """A decoded row: (id, text) of each part; "" continues an earlier row's document."""

    place: str
    parts: list[tuple[str, str]]


@dataclasses.dataclass
class Findings:
    """Results from the sampled shards."""

    shards: tuple[int, int]  # number of shards read, and in all
    lengths: np.ndarray  # int64[documents] tokens per document, including separators
    pieces: np.ndarray  # int64[vocabulary size] occurrences of each id
    words: int = 0  # number of words separated by white space
    word_tokens: int = 0
    # Corpus file -> [documents, tokens], if ids contain file names.
    by_file: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    duplicates: int = 0  # documents that repeat an earlier one
    groups: int = 0  # distinct repeated documents
    top_duplicates: list[DuplicateGroup] = dataclasses.field(default_factory=list)
    # Reason -> (id, location, text excerpt or "") of some documents.
    quarantine: dict[str, list[tuple[str, str, str]]] = dataclasses.field(default_factory=dict)
    rows: list[SampleRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class ShardContent:
    """One shard: tokens, row starts, and the document parts in its lineage."""

    tokens: np.ndarray
    row_begins: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    ids: list[str]

    def documents(self) -> Iterator[tuple[str, np.ndarray]]:
        cut = {self.ids[number] for number in np.flatnonzero(self.offsets).tolist()}
        parts: dict[str, list[tuple[int, np.ndarray]]] = {}
        for number, name in enumerate(self.ids):
            begin = self.begins[number]
            tokens = self.tokens[begin : begin + self.lengths[number]]
            if name in cut:
                parts.setdefault(name, []).append((int(self.offsets[number]), tokens))
            else:
                yield name, tokens
        for name, pieces in parts.items():
            ordered = sorted(pieces, key=operator.itemgetter(0))
            yield name, np.concatenate([tokens for _, tokens in ordered])


def study(folder: str, manifest: CacheManifest, loaded: Vocabulary, sample_shards: int) -> Findings:
    """Reads at most `sample_shards` shards per split, chosen by a hash of their names."""
    chosen: list[tuple[str, int]] = []
    for split, shards in manifest.splits.items():
        order = [hashlib.sha256(f"{split} {n}".encode()).digest() for n in range(len(shards))]
        indices = sorted(range(len(shards)), key=order.__getitem__)[:sample_shards]
        chosen += [(split, index) for index in sorted(indices)]
    every = sum(map(len, manifest.splits.values()))
    lengths, hashes = [np.zeros(0, np.int64)], [np.zeros(0, "S16")]
    found = Findings((len(chosen), every), lengths[0], np.zeros(loaded.size, np.int64))
    names = {file["name"] for file in manifest.plan.corpus.get("files", ())}
    with progress.shown("reading", len(chosen)) as bar:
        for number, (split, index) in enumerate(chosen, 1):
            shard = manifest.splits[split][index]
            content = read_shard(folder, manifest, split, index)
            found.pieces += np.bincount(content.tokens, minlength=loaded.size)
            documents = list(content.documents())
            lengths.append(np.array([len(tokens) for _, tokens in documents], np.int64))
            hashes.append(np.array([_digest(tokens) for _, tokens in documents], "S16"))
            for name, tokens in documents:
                if file := file_of(name.rpartition(":")[0], names):
                    counts = found.by_file.setdefault(file, [0, 0])
                    counts[0] += 1
                    counts[1] += len(tokens)
            left = _WORD_TOKENS - found.word_tokens
            if left > 0 and len(content.tokens):
                some = content.tokens[: max(1, left // max(1, len(chosen) // 4))]
                found.words += len(loaded.decode(some).split())
                found.word_tokens += len(some)
            if shard.dropped:
                name = shard_file(split, "quarantine", index, manifest.plan.shards[split])
                _add_quarantined(found, files.join(folder, name))
            if len(found.rows) < _EXAMPLES and shard.rows:
                found.rows.append(_sample_row(loaded, content, split, index))
            bar.update(number)
    found.lengths = np.concatenate(lengths)
    _find_duplicates(found, folder, manifest, loaded, chosen, hashes[1:])
    return found


def read_shard(folder: str, manifest: CacheManifest, split: str, index: int) -> ShardContent:
    from pyarrow import parquet

    from tasks.cache import records

    name = {
        kind: shard_file(split, kind, index, manifest.plan.shards[split])
        for kind in ("tfrecord", "rows", "documents")
    }
    with files.open_read(files.join(folder, name["rows"])) as file:
        rows = np.load(file, allow_pickle=False)
    data = memoryview(files.read_bytes(files.join(folder, name["tfrecord"])))
    ends = [*rows["offset"][1:].tolist(), len(data)]
    tokens = [np.zeros(0, np.int32)]
    for begin, end in zip(rows["offset"].tolist(), ends, strict=False):
        tokens.append(records.decode_row(records.unframe(data[begin:end])).tokens)
    with files.open_read(files.join(folder, name["documents"])) as file:
        lineage = parquet.read_table(file)
    row_begins = np.cumsum(rows["tokens"], dtype=np.int64) - rows["tokens"]
    row, position, lengths, offsets = (
        lineage.column(column).to_numpy().astype(np.int64)
        for column in ("row", "position", "tokens", "document_offset")
    )
    ids = lineage.column("id").to_pylist()
    begins = row_begins[row] + position
    return ShardContent(np.concatenate(tokens), row_begins, begins, lengths, offsets, ids)


def _digest(tokens: np.ndarray) -> bytes:
    # The last byte must not be zero: NumPy strips trailing zeros of byte strings.
    return hashlib.blake2b(tokens.tobytes(), digest_size=15).digest() + b"."


def _add_quarantined(found: Findings, path: str) -> None:
    for entry in map(json.loads, files.read_lines(path)):
        examples = found.quarantine.setdefault(entry["reason"], [])
        if len(examples) < _EXAMPLES:
            examples.append((entry["id"] or "", entry["location"], entry.get("text", "")))


def _sample_row(loaded: Vocabulary, content: ShardContent, split: str, index: int) -> SampleRow:
    number = len(content.row_begins) // 2
    begin = int(content.row_begins[number])
    after = content.row_begins[number + 1 : number + 2]
    end = int(after[0]) if len(after) else len(content.tokens)
    inside = np.flatnonzero((content.begins >= begin) & (content.begins < end)).tolist()
    cuts = [int(content.begins[piece]) for piece in inside]
    names = [content.ids[piece] for piece in inside]
    if not cuts or cuts[0] > begin:
        cuts, names = [begin, *cuts], ["", *names]
    parts = [
        (name, loaded.decode(content.tokens[start:stop]))
        for name, start, stop in zip(names, cuts, [*cuts[1:], end], strict=True)
    ]
    return SampleRow(f"{split}, shard {index}, row {number}", parts)


def _find_duplicates(
    found: Findings,
    folder: str,
    manifest: CacheManifest,
    loaded: Vocabulary,
    chosen: list[tuple[str, int]],
    hashes: list[np.ndarray],
) -> None:
    """Counts documents with equal tokens, and reads the examples to show again."""
    _, which, counts = np.unique(np.concatenate(hashes), return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts > 1)
    found.groups = len(repeated)
    found.duplicates = int((counts[repeated] - 1).sum())
    top = repeated[np.argsort(-counts[repeated], kind="stable")][:_TOP_DUPLICATES]
    firsts = np.concatenate([[0], np.cumsum([len(each) for each in hashes])])
    for group in top.tolist():
        places = np.flatnonzero(which == group)[:_EXAMPLES].tolist()
        ids, start = [], ""
        for place in places:
            number = int(np.searchsorted(firsts, place, side="right")) - 1
            documents = list(read_shard(folder, manifest, *chosen[number]).documents())
            name, tokens = documents[place - int(firsts[number])]
            ids.append(name)
            start = loaded.decode(tokens[:_START_TOKENS])
        found.top_duplicates.append(DuplicateGroup(int(counts[group]), ids, start))
