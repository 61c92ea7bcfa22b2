"""What is in a cache, as one HTML page: `python -m pipeline.report --cache=DIR`.

Counts of documents, tokens, rows and of what was left out are the whole cache's. What takes reading
the rows (lengths, pieces, duplicates, examples) is of at most --sample_shards shards of each split,
which the page says; memory grows with those alone, by 16 bytes a document. The page needs no
network and no JavaScript.
"""

import dataclasses
import hashlib
import html
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tasks.cache.manifest import CacheManifest, Shard, shard_file
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, positive, run
from tasks.vocabulary import UNK_ID, VOCABULARY, Vocabulary

_EXAMPLES = 3  # of each reason of quarantine, and rows shown in full
_TOP_PIECES = 24
_TOP_DUPLICATES = 8
_TOP_FILES = 200  # rows of the table of files
_START_TOKENS = 24  # of a document, shown to know it by
_WORD_TOKENS = 200_000  # turned back into text to count words
_QUANTILES = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)
_BINS_AN_OCTAVE = 2
_LEAST_BINS = 8


@dataclasses.dataclass(frozen=True)
class DuplicateGroup:
    """Documents of the same tokens: how many, some of their ids, how they begin."""

    count: int
    ids: list[str]
    start: str


@dataclasses.dataclass(frozen=True)
class SampleRow:
    """A decoded row: (id, text) of the document, or part of one, at each place in it.

    The id is empty for a document that began in an earlier row.
    """

    place: str
    parts: list[tuple[str, str]]


@dataclasses.dataclass
class Findings:
    """What reading the sampled shards showed.

    Attributes:
      shards: how many were read, of how many.
      lengths: int64[documents] tokens of each, separators included.
      pieces: int64[vocabulary size] how often each id occurs.
      words, word_tokens: counts of words (what white space separates) and their tokens.
      by_file: documents and tokens of each file of the corpus, where ids name it.
      duplicates, groups: documents that repeat an earlier one, and how many different ones do.
      top_duplicates: the largest groups.
      quarantine: reason -> (id, location) of some documents.
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
    """One shard: all its tokens, where rows and documents' pieces begin, and whose they are."""

    tokens: np.ndarray
    row_begins: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray
    ids: list[str]

    def documents(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (id, tokens) of each document, those that were cut put together."""
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
      CorruptRecord: a record is damaged; pipeline.verify says where and what to do.
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
    # Never ends in a zero byte, which numpy's strings would drop.
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
    """The row in the middle of the shard."""
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
    """Counts documents of equal tokens, and reads again those shown as examples."""
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
    """Returns the HTML page."""
    plan = manifest.plan
    title = f"Cache of {plan.task}"
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
        ("What it was built by", _provenance(folder, manifest)),
    ]
    links = "".join(f"<li><a href='#{_slug(name)}'>{name}</a></li>" for name, _ in sections)
    body = "".join(
        f"<section id='{_slug(name)}'><h2>{name}</h2>{content}</section>"
        for name, content in sections
    )
    return (
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>"
        f"<header><h1>{_text(title)}</h1><p>{_text(plan.corpus['spec'])}</p>"
        f"{_headline(manifest, found)}<nav aria-label=Contents><ul>{links}</ul></nav></header>"
        f"<main>{body}</main></body></html>\n"
    )


_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1.5rem 4rem; color: #1c2430;
  background: #fff; font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { margin: 0; font-size: 1.75rem; line-height: 1.25; }
h2 { margin: 2.75rem 0 .75rem; font-size: 1.25rem; }
header p { margin: .25rem 0 1.25rem; color: #4a5568; overflow-wrap: anywhere; }
nav ul { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: 1.25rem 0 0; padding: 0;
  list-style: none; }
a { color: #1a56a8; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; margin: 0; }
.figures dt { color: #4a5568; font-size: .875rem; }
.figures dd { margin: 0; font-size: 1.375rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: .75rem 0 1.5rem; }
caption { padding-bottom: .375rem; text-align: left; color: #4a5568; font-size: .875rem; }
th, td { padding: .3rem 1.25rem .3rem 0; border-bottom: 1px solid #e2e8f0; text-align: left;
  vertical-align: top; overflow-wrap: break-word; max-width: 36rem; }
th { font-weight: 600; white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.note { color: #4a5568; font-size: .875rem; }
code, .row { font: .875rem/1.6 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; }
.row { margin: .25rem 0 1.5rem; padding: .75rem 1rem; border: 1px solid #e2e8f0;
  border-radius: 6px; background: #f8fafc; white-space: pre-wrap; overflow-wrap: anywhere; }
.row b { padding: 0 .3rem; border-left: 3px solid #1a56a8; background: #dbe8f8; font-weight: 600; }
svg { display: block; width: 100%; max-width: 46rem; height: auto; margin: .5rem 0; }
svg text { fill: #4a5568; font: 12.5px system-ui, sans-serif; }
svg rect { fill: #3b76bd; }
.bar { display: inline-block; height: .7em; background: #3b76bd; }
"""


def _text(value: object) -> str:
    """Escapes; control characters, which HTML forbids, become pictures of themselves."""
    text = "".join(
        chr(0x2400 + ord(letter)) if letter < " " and letter not in "\n\t" else letter
        for letter in str(value)
    )
    return html.escape(text)


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")


def _table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], html_last: bool = False
) -> str:
    """A table; what is a number in a row, or looks like one, stands to the right.

    `html_last`: whether the last cell of each row is HTML already.
    """
    lines = []
    numeric = [True] * len(head)
    rows = [list(row) for row in rows]
    for row in rows:
        for column, cell in enumerate(row):
            looks = str(cell).replace(",", "").replace(".", "").rstrip(" %").isdigit()
            numeric[column] &= column > 0 and looks
    for row in rows:
        cells = []
        for column, cell in enumerate(row):
            content = str(cell) if html_last and column == len(row) - 1 else _text(cell)
            kind = "td class=number" if numeric[column] else "td"
            cells.append(f"<{kind}>{content}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    heads = "".join(
        f"<th scope=col{' class=number' if right and rows else ''}>{_text(name)}</th>"
        for name, right in zip(head, numeric, strict=True)
    )
    return (
        f"<div class=scroll><table><caption>{_text(caption)}</caption><thead><tr>{heads}</tr>"
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _headline(manifest: CacheManifest, found: Findings) -> str:
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
    items = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items()
    )
    return f"<dl class=figures>{items}</dl>"


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
    head = ("split", "shards", "documents", "of them split", "tokens", "rows", "rows filled")
    return _table(
        f"{plan.packing} packing into rows of {plan.row_tokens:,} tokens, separator "
        f"{plan.separator}",
        head,
        rows,
    )


def _corpus(manifest: CacheManifest, found: Findings, note: str) -> str:
    record = manifest.plan.corpus
    facts = [
        (name, value if isinstance(value, str) else f"{value:,}")
        for name, value in sorted(record.items())
        if isinstance(value, str | int | float) and value != ""
    ]
    parts = [_table("As it was found", ("what", "value"), facts)]
    sources = record.get("files", [])
    if sources:
        rows = []
        for file in sources[:_TOP_FILES]:
            documents, tokens = found.by_file.get(file["name"], ("–", "–"))
            state = file.get("sha256") or file.get("etag") or "–"
            cells = [n if isinstance(n, str) else f"{n:,}" for n in (documents, tokens)]
            rows.append((file["name"], file["split"], f"{file['bytes']:,}", *cells, state[:16]))
        shown = "" if len(sources) <= _TOP_FILES else f", the first {_TOP_FILES}"
        head = ("file", "split", "bytes", "documents", "tokens", "sha256 or etag")
        parts.append(_table(f"Files: {len(sources):,}{shown}", head, rows))
        if found.by_file:
            parts.append(note)
        else:
            parts.append(
                "<p class=note>Documents have ids of their own, which do not name their file.</p>"
            )
    return "".join(parts)


def _lengths(manifest: CacheManifest, found: Findings) -> str:
    if not len(found.lengths):
        return "<p>There are no documents.</p>"
    quantiles = np.quantile(found.lengths, _QUANTILES, method="lower").astype(int)
    names = ["least", *(f"{share:.0%}" for share in _QUANTILES[1:-1]), "most"]
    table = _table(
        f"Tokens of a document: so many at most in this share of {len(found.lengths):,}",
        ("share", *names),
        [("tokens", *(f"{value:,}" for value in quantiles))],
    )
    mean = found.lengths.mean()
    return f"{_histogram(found.lengths)}{table}<p>The mean is {mean:,.1f} tokens.</p>"


def _histogram(lengths: np.ndarray) -> str:
    """Bars over bins of equal width in the logarithm, each with its numbers as a title."""
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
        "tokens of a document (logarithmic)</text>"
    )
    marks.append(f"<path d='M{left} {base}H{width - right}' stroke='#94a3b8'/>")
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
        ("bytes a token", f"{text_bytes / max(text_tokens, 1):.3f}"),
        ("tokens a word", f"{found.word_tokens / max(found.words, 1):.3f}"),
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
    return _table("How it fits the corpus", ("what", "value"), facts) + _table(
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
        ("documents with the tokens of an earlier one", f"{found.duplicates:,}"),
        ("share of the documents", f"{share:.2%}"),
        ("groups of equal documents", f"{found.groups:,}"),
    ]
    return _table("Nothing was removed", ("what", "value"), facts) + _table(
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
    return _table("Documents by reason", ("reason", "documents", "some of them"), rows)


def _rows(found: Findings) -> str:
    if not found.rows:
        return "<p>There are no rows.</p>"
    parts = ["<p>Decoded; a mark with its id shows where a document begins.</p>"]
    for row in found.rows:
        text = "".join(
            (f"<b>{_text(name)}</b> " if name else "") + _text(part) + "\n"
            for name, part in row.parts
        )
        parts.append(f"<h3 class=note>{_text(row.place)}</h3><div class=row>{text.rstrip()}</div>")
    return "".join(parts)


def _provenance(folder: str, manifest: CacheManifest) -> str:
    vocabulary = manifest.plan.vocabulary
    facts = [
        ("cache", folder),
        ("plan's fingerprint", manifest.plan.fingerprint),
        ("vocabulary, sha256", vocabulary.sha256),
        (
            "ids",
            f"{vocabulary.size:,}, of them {vocabulary.sentinels} sentinels",
        ),
        ("format", manifest.plan.format),
        *sorted(manifest.software.items()),
    ]
    return _table("", ("what", "value"), facts) + (
        "<p class=note>manifest.json has the sha256 of every file; "
        "<code>python -m pipeline.verify</code> checks them all.</p>"
    )


def main(argv: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m pipeline.report", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cache", required=True, help="the cache's folder: CACHE_DIR/TASK")
    add("--output", default="report.html", help="the file to write")
    add("--sample_shards", type=positive, default=32, help="shards of each split to read, at most")
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
