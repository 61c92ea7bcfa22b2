"""Describes a cache on one HTML page: `python -m pipeline.report --cache=DIR`.

The numbers of documents, tokens, rows and omitted documents are those of the whole cache. Whatever
requires reading rows (lengths, pieces, duplicates, examples) comes from at most --sample_shards
shards of each split, as the page says. Memory grows with the sample alone, by 16 bytes per
document. The page needs no network and no JavaScript.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator

import numpy as np

from tasks.cache.manifest import CacheManifest, Shard, shard_file
from tasks.inspection import page as html_page
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, positive, run
from tasks.vocabulary import UNK_ID, VOCABULARY, Vocabulary

_EXAMPLES = 3  # documents shown per reason of quarantine, and rows shown in full
_TOP_PIECES = 24
_TOP_DUPLICATES = 8
_TOP_FILES = 200  # rows of the table of files
_START_TOKENS = 24  # tokens shown of a repeated document
_WORD_TOKENS = 200_000  # tokens that are decoded to count words
_QUANTILES = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
_BINS_AN_OCTAVE = 2
_LEAST_BINS = 8


@dataclasses.dataclass(frozen=True)
class DuplicateGroup:
    """Documents with equal tokens: their number, some of their ids, and the start of their text."""

    count: int
    ids: list[str]
    start: str


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """A decoded row: (id, text) of each part.

    The id is empty for the rest of a document that began in an earlier row.
    """

    place: str
    parts: list[tuple[str, str]]


@dataclasses.dataclass
class Findings:
    """Results from the sampled shards.

    Attributes:
      shards: (number of shards read, number of shards).
      lengths: int64[documents] tokens per document, including separators.
      pieces: int64[vocabulary size] number of occurrences of each id.
      words, word_tokens: numbers of words, separated by white space, and of their tokens.
      by_file: [documents, tokens] of each file of the corpus, if the ids contain the file's name.
      duplicates: number of documents that repeat an earlier one.
      groups: number of distinct documents that are repeated.
      top_duplicates: the largest groups of equal documents.
      quarantine: (id, location) of some documents by reason.
      rows: some rows.
    """

    shards: tuple[int, int]
    lengths: np.ndarray
    pieces: np.ndarray
    words: int = 0
    word_tokens: int = 0
    by_file: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    duplicates: int = 0
    groups: int = 0
    top_duplicates: list[DuplicateGroup] = dataclasses.field(default_factory=list)
    quarantine: dict[str, list[tuple[str, str]]] = dataclasses.field(default_factory=dict)
    rows: list[SampleRow] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _ShardContent:
    """One shard: its tokens, the start of each row, and the parts of documents in its lineage."""

    tokens: np.ndarray
    row_begins: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    ids: list[str]

    def documents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (id, tokens) of each document, joining the parts of those that were cut."""
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
            yield name, np.concatenate([tokens for _, tokens in sorted(pieces, key=_offset)])


def _offset(piece: tuple[int, np.ndarray]) -> int:
    return piece[0]


def study(folder: str, manifest: CacheManifest, loaded: Vocabulary, sample_shards: int) -> Findings:
    """Reads at most `sample_shards` shards of each split, chosen by a hash of their names.

    Raises:
      CorruptRecord: a record is damaged; pipeline.verify reports the place and the remedy.
      OSError: a file cannot be read.
    """
    chosen = [key for split in manifest.splits for key in _choose(manifest, split, sample_shards)]
    every = sum(map(len, manifest.splits.values()))
    lengths, hashes = [np.zeros(0, np.int64)], [np.zeros(0, "S16")]
    found = Findings((len(chosen), every), lengths[0], np.zeros(loaded.size, np.int64))
    names = {file["name"] for file in manifest.plan.corpus.get("files", ())}
    with progress.shown("reading", len(chosen)) as bar:
        for number, (split, index) in enumerate(chosen, 1):
            shard = manifest.splits[split][index]
            content = _read(folder, manifest, split, index)
            found.pieces += np.bincount(content.tokens, minlength=loaded.size)
            documents = list(content.documents())
            lengths.append(np.array([len(tokens) for _, tokens in documents], np.int64))
            hashes.append(np.array([_digest(tokens) for _, tokens in documents], "S16"))
            for name, tokens in documents:
                file = name.rpartition(":")[0]
                if file in names:
                    counts = found.by_file.setdefault(file, [0, 0])
                    counts[0] += 1
                    counts[1] += len(tokens)
            _count_words(found, loaded, content)
            _quarantine(found, folder, manifest, split, index, shard)
            if len(found.rows) < _EXAMPLES and shard.rows:
                found.rows.append(_sample_row(loaded, content, split, index))
            bar.update(number)
    found.lengths = np.concatenate(lengths)
    _find_duplicates(found, folder, manifest, loaded, chosen, hashes[1:])
    return found


def _choose(manifest: CacheManifest, split: str, count: int) -> list[tuple[str, int]]:
    def order(index: int) -> bytes:
        return hashlib.sha256(f"{split} {index}".encode()).digest()

    indices = sorted(range(len(manifest.splits[split])), key=order)[:count]
    return [(split, index) for index in sorted(indices)]


def _read(folder: str, manifest: CacheManifest, split: str, index: int) -> _ShardContent:
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
        tokens.append(records.decode_row(records.unframe(data[begin:end])).targets)
    with files.open_read(files.join(folder, name["documents"])) as file:
        lineage = parquet.read_table(file)
    row_begins = np.cumsum(rows["tokens"], dtype=np.int64) - rows["tokens"]
    row, position, lengths, offsets = (
        lineage.column(column).to_numpy().astype(np.int64)
        for column in ("row", "position", "tokens", "document_offset")
    )
    ids = lineage.column("id").to_pylist()
    begins = row_begins[row] + position
    return _ShardContent(np.concatenate(tokens), row_begins, begins, lengths, offsets, ids)


def _digest(tokens: np.ndarray) -> bytes:
    # The last byte must not be zero: numpy drops zeros at the end of byte strings.
    return hashlib.blake2b(tokens.tobytes(), digest_size=15).digest() + b"."


def _count_words(found: Findings, loaded: Vocabulary, content: _ShardContent) -> None:
    left = _WORD_TOKENS - found.word_tokens
    if left > 0 and len(content.tokens):
        tokens = content.tokens[: max(1, left // max(1, found.shards[0] // 4))]
        found.words += len(loaded.decode(tokens).split())
        found.word_tokens += len(tokens)


def _quarantine(
    found: Findings, folder: str, manifest: CacheManifest, split: str, index: int, shard: Shard
) -> None:
    if not shard.dropped:
        return
    name = shard_file(split, "quarantine", index, manifest.plan.shards[split])
    with files.open_read(files.join(folder, name)) as file:
        for line in file:
            entry = json.loads(line)
            examples = found.quarantine.setdefault(entry["reason"], [])
            if len(examples) < _EXAMPLES:
                examples.append((entry["id"] or "", entry["location"]))


def _sample_row(loaded: Vocabulary, content: _ShardContent, split: str, index: int) -> SampleRow:
    """Returns the row in the middle of the shard."""
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
    """Counts documents with equal tokens, and rereads those that are shown as examples."""
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
            documents = list(_read(folder, manifest, *chosen[number]).documents())
            name, tokens = documents[place - int(firsts[number])]
            ids.append(name)
            start = loaded.decode(tokens[:_START_TOKENS])
        found.top_duplicates.append(DuplicateGroup(int(counts[group]), ids, start))


def page(folder: str, manifest: CacheManifest, loaded: Vocabulary, found: Findings) -> str:
    """Returns the report as HTML."""
    plan = manifest.plan
    read, every = found.shards
    note = f"<p class=note>From {read:,} of the {every:,} shards.</p>" if read < every else ""
    sections = [
        ("Splits", _splits(manifest)),
        ("Corpus", _corpus(manifest, found, note)),
        ("Document lengths", note + _lengths(manifest, found)),
        ("Vocabulary", note + _vocabulary(manifest, loaded, found)),
        ("Duplicates", note + _duplicates(found)),
        ("Left out", _left_out(manifest, found)),
        ("Rows", note + _rows(found)),
        ("Provenance", _provenance(folder, manifest)),
    ]
    body = "".join(
        f"<article id={_slug(name)}><h2>{name}</h2>{content}</article>"
        for name, content in sections
    )
    return html_page.document(
        f"Cache of {plan.task}",
        {_slug(name): name for name, _ in sections},
        head=f"<p>{html_page.text(plan.corpus['spec'])}</p>{_headline(manifest)}",
        body=f"<main>{body}</main>",
        interactive=False,
    )


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def _headline(manifest: CacheManifest) -> str:
    splits = manifest.splits
    size = sum(
        entry.bytes
        for shards in splits.values()
        for each in shards
        for entry in each.files.values()
    )
    left_out = sum(sum(manifest.dropped(split).values()) for split in splits)
    figures = {
        "documents": f"{sum(manifest.total(split, 'documents') for split in splits):,}",
        "tokens": f"{sum(manifest.total(split, 'tokens') for split in splits):,}",
        "text": _size(sum(manifest.total(split, "text_bytes") for split in splits)),
        "on disk": _size(size),
        "left out": f"{left_out:,}",
    }
    return html_page.facts(figures.items(), "figures")


def _size(size: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size / 1e3:,.2f} kB"


def _splits(manifest: CacheManifest) -> str:
    rows = []
    for split, shards in manifest.splits.items():
        tokens, count = manifest.total(split, "tokens"), manifest.total(split, "rows")
        room = count * manifest.plan.row_tokens
        rows.append(
            (
                split,
                f"{len(shards):,}",
                f"{manifest.total(split, 'documents'):,}",
                f"{manifest.total(split, 'split_documents'):,}",
                f"{tokens:,}",
                f"{count:,}",
                f"{tokens / room:.2%}" if room else "–",
            )
        )
    plan = manifest.plan
    header = ("split", "shards", "documents", "split documents", "tokens", "rows", "rows filled")
    return html_page.table(
        f"{plan.packing} packing into rows of {plan.row_tokens:,} tokens, separator "
        f"{plan.separator}",
        header,
        rows,
    )


def _corpus(manifest: CacheManifest, found: Findings, note: str) -> str:
    record = manifest.plan.corpus
    facts = [
        (name, value if isinstance(value, str) else f"{value:,}")
        for name, value in sorted(record.items())
        if isinstance(value, str | int | float) and value != ""
    ]
    parts = [html_page.table("As resolved by the build", ("name", "value"), facts)]
    sources = record.get("files", [])
    if sources:
        rows = []
        for file in sources[:_TOP_FILES]:
            documents, tokens = found.by_file.get(file["name"], ("–", "–"))
            state = file.get("sha256") or file.get("etag") or "–"
            cells = [n if isinstance(n, str) else f"{n:,}" for n in (documents, tokens)]
            rows.append((file["name"], file["split"], f"{file['bytes']:,}", *cells, state[:16]))
        shown = "" if len(sources) <= _TOP_FILES else f", the first {_TOP_FILES}"
        header = ("file", "split", "bytes", "documents", "tokens", "sha256 or etag")
        parts.append(html_page.table(f"Files: {len(sources):,}{shown}", header, rows))
        if found.by_file:
            parts.append(note)
        else:
            parts.append(
                "<p class=note>The corpus has its own document ids, which do not name files.</p>"
            )
    return "".join(parts)


def _lengths(manifest: CacheManifest, found: Findings) -> str:
    if not len(found.lengths):
        return "<p>The cache holds no documents.</p>"
    quantiles = np.quantile(found.lengths, _QUANTILES, method="lower").astype(int)
    names = ["minimum", *(f"{share:.0%}" for share in _QUANTILES[1:-1]), "maximum"]
    table = html_page.table(
        f"Tokens per document: quantiles of {len(found.lengths):,} documents",
        ("quantile", *names),
        [("tokens", *(f"{value:,}" for value in quantiles))],
    )
    mean = found.lengths.mean()
    return f"{_histogram(found.lengths)}{table}<p>The mean is {mean:,.1f} tokens.</p>"


def _histogram(lengths: np.ndarray) -> str:
    """Returns a histogram with logarithmic bins as SVG; each bar's title gives its numbers."""
    bins = np.floor(np.log2(np.maximum(lengths, 1)) * _BINS_AN_OCTAVE).astype(int)
    low, high = int(bins.min()), max(int(bins.max()), int(bins.min()) + _LEAST_BINS - 1)
    counts = np.bincount(bins - low, minlength=_LEAST_BINS)
    width, height, left, right, bottom = 736, 220, 56, 28, 34
    step = (width - left - right) / len(counts)
    top = int(counts.max())
    marks = []
    for number, count in enumerate(counts.tolist()):
        tall = (height - bottom - 18) * count / top
        x, y = left + number * step, height - bottom - tall
        begin, end = (2 ** ((low + number + more) / _BINS_AN_OCTAVE) for more in (0, 1))
        span = f"{np.ceil(begin):,.0f} to {np.ceil(end) - 1:,.0f} tokens: {count:,} documents"
        marks.append(
            f"<rect x={x + 1:.1f} y={y:.1f} width={max(step - 2, 1):.1f} height={tall:.1f}>"
            f"<title>{span}</title></rect>"
        )
    octaves = range(-(-low // _BINS_AN_OCTAVE), high // _BINS_AN_OCTAVE + 2)
    every = max(1, len(octaves) // 8)
    for octave in list(octaves)[::every]:
        x = left + (octave * _BINS_AN_OCTAVE - low) * step
        if left <= x <= width - right + 1:
            marks.append(
                f"<text x={x:.1f} y={height - bottom + 16} text-anchor=middle>{2**octave:,}</text>"
            )
    base = height - bottom
    marks.append(f"<text x={left - 8} y={base} text-anchor=end>0</text>")
    marks.append(f"<text x={left - 8} y=22 text-anchor=end>{top:,}</text>")
    marks.append(f"<text x={left} y=12>documents</text>")
    marks.append(
        f"<text x={(left + width - right) / 2} y={height - 3} text-anchor=middle>"
        "tokens per document (logarithmic)</text>"
    )
    marks.append(f"<path d='M{left} {base}H{width - right}'/>")
    label = f"Histogram of document lengths from {lengths.min():,} to {lengths.max():,} tokens"
    return (
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{label}'>{''.join(marks)}</svg>"
    )


def _vocabulary(manifest: CacheManifest, loaded: Vocabulary, found: Findings) -> str:
    processor = loaded.processor
    total = max(int(found.pieces.sum()), 1)
    of_text = [
        token
        for token in range(loaded.record.pieces)
        if token < loaded.first_sentinel
        and not processor.is_control(token)
        and not processor.is_unknown(token)
    ]
    unused = sum(not found.pieces[token] for token in of_text)
    in_bytes = sum(int(found.pieces[token]) for token in of_text if processor.is_byte(token))
    text_bytes = sum(manifest.total(split, "text_bytes") for split in manifest.splits)
    text_tokens = sum(manifest.total(split, "text_tokens") for split in manifest.splits)
    facts = [
        ("pieces of text", f"{len(of_text):,}"),
        ("never used", f"{unused / max(len(of_text), 1):.2%}"),
        ("bytes per token", f"{text_bytes / max(text_tokens, 1):.3f}"),
        ("tokens per word", f"{found.word_tokens / max(found.words, 1):.3f}"),
        ("unknown tokens", f"{found.pieces[UNK_ID] / total:.4%}"),
        ("byte-fallback tokens", f"{in_bytes / total:.4%}"),
    ]
    order = np.argsort(-found.pieces, kind="stable")[:_TOP_PIECES].tolist()
    most = max(int(found.pieces.max()), 1)
    rows = [
        (
            loaded.processor.id_to_piece(token),
            f"{found.pieces[token]:,}",
            f"{found.pieces[token] / total:.2%}",
            f"<span class=bar style='width:{10 * found.pieces[token] / most:.2f}rem'></span>",
        )
        for token in order
        if found.pieces[token]
    ]
    return html_page.table("Fit to the corpus", ("name", "value"), facts) + html_page.table(
        "The most frequent pieces", ("piece", "times", "share", ""), rows, html_last=True
    )


def _duplicates(found: Findings) -> str:
    if not found.duplicates:
        return "<p>No two documents have the same tokens.</p>"
    share = found.duplicates / max(len(found.lengths), 1)
    rows = [
        (group.start, f"{group.count:,}", ", ".join(group.ids)) for group in found.top_duplicates
    ]
    facts = [
        ("documents with the same tokens as an earlier one", f"{found.duplicates:,}"),
        ("share of the documents", f"{share:.2%}"),
        ("groups of equal documents", f"{found.groups:,}"),
    ]
    return html_page.table("Nothing was removed", ("name", "value"), facts) + html_page.table(
        "The largest groups", ("begins with", "documents", "some ids"), rows
    )


def _left_out(manifest: CacheManifest, found: Findings) -> str:
    counts: Counter[str] = Counter()
    for split in manifest.splits:
        counts.update(manifest.dropped(split))
    if not counts:
        return "<p>No document was left out.</p>"
    rows = []
    for reason, count in counts.most_common():
        examples = found.quarantine.get(reason, [])
        places = "; ".join(f"{name} ({place})" if name else place for name, place in examples)
        rows.append((reason, f"{count:,}", places or "in shards that were not read"))
    return html_page.table("Documents by reason", ("reason", "documents", "some of them"), rows)


def _rows(found: Findings) -> str:
    if not found.rows:
        return "<p>The shards that were read hold no rows.</p>"
    parts = ["<p>Decoded text; each document begins with its id.</p>"]
    for row in found.rows:
        text = "".join(
            (f"<b>{html_page.text(name)}</b> " if name else "") + html_page.text(part) + "\n"
            for name, part in row.parts
        )
        parts.append(f"<h3 class=note>{html_page.text(row.place)}</h3>")
        parts.append(f"<div class=row>{text.rstrip()}</div>")
    return "".join(parts)


def _provenance(folder: str, manifest: CacheManifest) -> str:
    vocabulary = manifest.plan.vocabulary
    facts = [
        ("cache", folder),
        ("fingerprint of the plan", manifest.plan.fingerprint),
        ("SHA-256 of the vocabulary", vocabulary.sha256),
        ("ids", f"{vocabulary.size:,}, including {vocabulary.sentinels} sentinels"),
        ("format", manifest.plan.format),
        *sorted(manifest.software.items()),
    ]
    return html_page.table("", ("name", "value"), facts) + (
        "<p class=note>manifest.json records the SHA-256 of every file; "
        "<code>python -m pipeline.verify</code> checks them.</p>"
    )


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m pipeline.report", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cache", required=True, help="folder of the cache: CACHE_DIR/TASK")
    add("--output", "--html", default="report.html", help="HTML file to write")
    add("--sample_shards", type=positive, default=32, help="most shards of each split to read")
    flags = parser.parse_args(argv)

    from tasks import vocabulary

    manifest = CacheManifest.load(flags.cache)
    loaded = vocabulary.load(
        files.join(flags.cache, VOCABULARY), manifest.plan.vocabulary.extra_ids
    )
    found = study(flags.cache, manifest, loaded, flags.sample_shards)
    files.write_bytes(flags.output, page(flags.cache, manifest, loaded, found).encode())
    print(f"{flags.output}: read {found.shards[0]:,} of {found.shards[1]:,} shards")


if __name__ == "__main__":
    run(main)
