"""Batches of documents, limited in number and in bytes; `sources.read` describes their columns."""

from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tasks import arrow
from tasks.document_kind import DocumentKind
from tasks.reading import long_documents
from tasks.reading.long_documents import Document

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Batches = Generator["pa.RecordBatch", None, None]

# A batch has at most this many bytes of text, unless a single document is larger.
BATCH_BYTES = 4 << 20


def collect(
    documents: Iterable[Document], count: int, longest: int, unit: DocumentKind = DocumentKind.TEXT
) -> Batches:
    """Yields batches of at most `count` documents; splits texts of more than `longest` bytes."""
    rows: list[Document] = []
    size = 0
    for document in _split_long(documents, longest) if unit is DocumentKind.TEXT else documents:
        content = document[1]
        if isinstance(content, tuple):
            length = sum(map(len, filter(None, content)))
        else:
            length = len(content or "")
        if rows and (len(rows) >= count or size + length > BATCH_BYTES):
            yield _batch_of(rows, unit)
            rows, size = [], 0
        rows.append(document)
        size += length
    if rows:
        yield _batch_of(rows, unit)


def _split_long(documents: Iterable[Document], longest: int) -> Iterator[Document]:
    for document in documents:
        name, text, _, part, place = document
        # A character has at most four bytes.
        if isinstance(text, str) and 4 * len(text) > longest:
            text = text.encode()
        if isinstance(text, bytes) and len(text) > longest and not part:
            yield from long_documents.parts(name, long_documents.chunked(text), longest, place)
        else:
            yield name, text, *document[2:]


def _batch_of(rows: list[Document], unit: DocumentKind) -> "pa.RecordBatch":
    import numpy as np

    ids, contents, problems, parts, places = map(list, zip(*rows, strict=True))
    sides = [contents]
    if unit is DocumentKind.PAIR:
        sides = [[pair and pair[side] for pair in contents] for side in (0, 1)]
    ids, problems, places = map(arrow.of_names, (ids, problems, places))
    texts = list(map(arrow.of_texts, sides))
    return batch(ids, texts, problems, places, arrow.of_numbers(np.array(parts, np.int32)))


def batch(
    ids: "pa.Array",
    texts: Sequence["pa.Array"],
    problems: "pa.Array",
    places: "pa.Array",
    parts: Any = None,
) -> "pa.RecordBatch":
    """Returns a batch with one array of texts, or with one of inputs and one of targets.

    If `parts` is None, all documents are whole.
    """
    import numpy as np
    import pyarrow as pa

    parts = arrow.of_numbers(np.zeros(len(ids), np.int32)) if parts is None else parts
    names = (DocumentKind.PAIR if len(texts) == 2 else DocumentKind.TEXT).columns
    columns = {"id": ids, **dict(zip(names, texts, strict=True)), "problem": problems}
    return pa.RecordBatch.from_pydict({**columns, "part": parts, "place": places})


def bounded(batch: "pa.RecordBatch", count: int, unit: DocumentKind = DocumentKind.TEXT) -> Batches:
    """Slices a batch into batches of at most `count` documents and BATCH_BYTES of text."""
    import numpy as np

    ends = np.cumsum(sum(arrow.sizes(batch.column(name)) for name in unit.columns))
    begin = 0
    while begin < batch.num_rows:
        done = ends[begin - 1] if begin else 0
        fits = int(np.searchsorted(ends, done + BATCH_BYTES, side="right"))
        end = min(max(fits, begin + 1), begin + count)
        yield batch.slice(begin, end - begin)
        begin = end


def gathered(
    found: Iterable[tuple[str, "pa.RecordBatch"]],
) -> Iterator[tuple[str, "pa.RecordBatch"]]:
    """Joins small (split, batch) of one split up to BATCH_BYTES; its documents keep their order.

    Each batch has a fixed cost in every later step, and a piece may consist of thousands: small
    row groups, small files, the few documents held out of each batch.
    """
    waiting: defaultdict[str, list[pa.RecordBatch]] = defaultdict(list)
    sizes: Counter[str] = Counter()
    for split, batch in found:
        earlier = waiting[split]
        fits = sizes[split] + batch.nbytes <= BATCH_BYTES
        if earlier and not (fits and batch.schema == earlier[0].schema):
            yield split, _joined(earlier)
            sizes[split] = 0
            earlier.clear()
        earlier.append(batch)
        sizes[split] += batch.nbytes
    yield from ((split, _joined(batches)) for split, batches in waiting.items())


def _joined(batches: Sequence["pa.RecordBatch"]) -> "pa.RecordBatch":
    import pyarrow as pa

    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def as_text(raw: "pa.LargeBinaryArray") -> tuple["pa.LargeStringArray", "pa.StringArray"]:
    """Returns texts and their problems; a missing or invalid text is null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    problems = pa.nulls(len(raw), pa.string())
    if raw.null_count:
        problems = pc.if_else(pc.is_null(raw), "null", problems)
    try:
        return raw.cast(pa.large_string()), problems  # fails unless it is UTF-8
    except pa.ArrowInvalid:
        valid = pa.array(
            [not value.is_valid or long_documents.is_utf8(value.as_buffer()) for value in raw]
        )
        texts = pc.if_else(valid, raw, pa.scalar(None, pa.large_binary()))
        return texts.cast(pa.large_string()), pc.if_else(valid, problems, "invalid UTF-8")


def places(file: str, numbers: "np.ndarray") -> "pa.StringArray":
    """Returns "file:number" places, which are the default document ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count, spelled = len(numbers), arrow.of_numbers(numbers).cast(pa.string())
    files, nothing = (arrow.repeated(text, count) for text in (f"{file}:", ""))
    return pc.binary_join_element_wise(files, spelled, nothing)
