"""Corpora: from a SPEC on the command line to batches of documents that any worker can read.

    python_docs                               documentation of Python's standard library
    parquet:GLOB                              one document a row
    json:GLOB                                 JSON lines
    text:GLOB                                 one document a line; blank lines are skipped
    hf:OWNER/NAME[:CONFIG][@REVISION]         a Hugging Face data set of such files, streamed

GLOB is a path of this machine or any fsspec URL, with *, ** and [..]; a "?" begins the options, as
in a URL: `?column=text&split=train&id=id&validation=0.01`. JSON lines and text may be compressed
(.gz, .bz2, .xz, .zst); such a file has one reader.

Splits. A corpus has `train` and `validation`. A file whose name or folder says validation (valid,
val, dev) belongs to validation, one that says test (eval) to test, all others to train; Hugging
Face data sets name their splits themselves. Where a corpus has no validation of its own, the share
`validation` of its documents is held out of train, chosen by a hash of their ids. `split=NAME`
reads NAME as train; `split=validation` reads validation alone, the corpus's own or the held out.

Ids. A document is known by column `id` (or the one that `id=` names), else by
"file:row" (parquet) or "file:byte" (lines), the same however the corpus is cut into pieces.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tasks.cache.manifest import LONGEST_DOCUMENT_BYTES
from tasks.reading import readers, stdlib_docs
from tasks.storage import files
from tasks.terminal.command_line import UserError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

FORMS = (
    "python_docs, parquet:GLOB, json:GLOB, text:GLOB or hf:OWNER/NAME[:CONFIG][@REVISION], "
    "each with ?column=text&split=train&id=id&validation=0.01 as needed"
)
TRAIN = "train"
VALIDATION = "validation"

_FORMATS = ("parquet", "json", "text")
_OPTIONS = ("column", "split", "id", "validation")
# Source: the keywords of datasets/data_files.py, so that files and the Hub agree.
_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), VALIDATION),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
# A small corpus is cut into this many pieces, so that it too fills several workers, unless they
# would be smaller than what is worth a worker's while.
_LEAST_PIECES = 8
_LEAST_PIECE_BYTES = 64 << 10
_LEAST_DOCUMENT_BYTES = 4  # the longest character
# Of a file of JSON lines so much is looked at for its columns: one small request each.
_PEEK_BYTES = 256 << 10
_PEEK_LINES = 100
_JSON_KINDS = {
    bool: "true or false", int: "number", float: "number", list: "array", dict: "object",
}  # fmt: skip
_INSPECTORS = 16  # files looked at concurrently: bound by latency where they are remote


@dataclasses.dataclass(frozen=True)
class CorpusSpec:
    """A parsed SPEC; `str()` gives a SPEC that parses to the same."""

    kind: str
    location: str = ""
    config: str = ""
    revision: str = ""
    column: str = "text"
    split: str = TRAIN
    id: str = ""
    validation: float = 0.01

    def __str__(self) -> str:
        head = f"{self.kind}:{self.location}" if self.location else self.kind
        head += f":{self.config}" if self.config else ""
        head += f"@{self.revision}" if self.revision else ""
        usual = _usual(self.kind)
        options = {
            name: value
            for name in _OPTIONS
            if (value := getattr(self, name)) != getattr(usual, name)
        }
        return f"{head}?{urllib.parse.urlencode(options)}" if options else head


def _usual(kind: str) -> CorpusSpec:
    """The options' defaults. The built-in corpus is small and needs more held out to measure on."""
    return CorpusSpec(kind, validation=0.1 if kind == "python_docs" else 0.01)


def parse(text: str) -> CorpusSpec:
    """Parses a SPEC.

    Raises:
      UserError: it is none; says what is wrong and shows the forms.
    """
    head, _, query = text.partition("?")
    kind, _, location = head.partition(":")
    if kind not in ("python_docs", "hf", *_FORMATS):
        raise _bad(text, f"unknown kind {kind!r}{nearest(kind, ('python_docs', 'hf', *_FORMATS))}")
    if bool(location) == (kind == "python_docs"):
        raise _bad(text, f"{kind} takes no path" if location else f"{kind}: needs a path after it")
    config = revision = ""
    if kind == "hf":
        location, at, revision = location.partition("@")
        location, colon, config = location.partition(":")
        if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", location):
            raise _bad(text, f"{location!r} is not OWNER/NAME")
        if (at and not revision) or (colon and not config):
            raise _bad(text, "a revision or configuration is empty")
    options: dict[str, Any] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS:
            raise _bad(text, f"unknown option {name!r}{nearest(name, _OPTIONS)}")
        if not value:
            raise _bad(text, f"option {name!r} is empty")
        options[name] = value
    if kind in ("text", "python_docs") and {"column", "id"} & options.keys():
        raise _bad(text, f"{kind} has no columns")
    if "validation" in options:
        try:
            options["validation"] = float(options["validation"])
        except ValueError:
            options["validation"] = math.nan
        if not 0 <= options["validation"] < 1:
            raise _bad(text, "validation is a share: at least 0 and less than 1")
    return dataclasses.replace(
        _usual(kind), location=location, config=config, revision=revision, **options
    )


def _bad(text: str, reason: str) -> UserError:
    return UserError(f"corpus {text!r}: {reason}; a corpus is {FORMS}")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """A file of a corpus: how to open it, its name inside the corpus, its split and its state."""

    path: str
    name: str
    split: str
    bytes: int
    state: dict[str, str]
    written: str = ""

    @property
    def etag(self) -> str:
        """What a store elsewhere says of its content, or when a file here was written."""
        return "".join(self.state.values()) or self.written


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one worker reads: a range of rows or of bytes, or some of the built-in documents.

    `name` is unique in its corpus; `splits` are those it may have documents of; `bytes` is its
    size (parquet: of the text column, uncompressed). Lines belong to the piece that they begin in.
    `file_bytes` and `etag` are the file's when the corpus was listed.
    """

    name: str
    splits: tuple[str, ...]
    bytes: int
    held_out: bool
    format: str
    path: str = ""
    file: str = ""
    start: int = 0
    stop: int | None = None
    file_bytes: int = 0
    etag: str = ""
    members: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus as it was found: plain data, without secrets, that may travel to any worker.

    `record` is what a manifest keeps, as JSON: equal for equal content, wherever the files lie.
    """

    spec: CorpusSpec
    record: dict[str, Any]
    pieces: tuple[Piece, ...]

    @property
    def max_document_bytes(self) -> int:
        """UTF-8 bytes of the longest document; longer ones are read in parts."""
        return self.record["max_document_bytes"]


def resolve(
    spec: CorpusSpec,
    piece_bytes: int = 64 << 20,
    max_document_bytes: int = LONGEST_DOCUMENT_BYTES,
    earlier: Sequence[Sequence[str]] = (),
) -> Corpus:
    """Lists a corpus's files once, pins their state, and cuts them into pieces.

    The pieces depend on the files and `piece_bytes` alone, never on the machine. Documents of more
    than `max_document_bytes` of UTF-8 will be read in parts. `earlier` names the files that a cache
    has already, by generation: those are cut as they were then, and come first; files that are new
    are the last generation.

    Raises:
      UserError: nothing matches, or a file cannot be read, or a column or split is missing.
    """
    if max_document_bytes < _LEAST_DOCUMENT_BYTES:
        raise UserError(
            f"max_document_bytes={max_document_bytes} is too little for one character: "
            f"give at least {_LEAST_DOCUMENT_BYTES}"
        )
    if spec.kind == "python_docs":
        return _resolve_python_docs(spec, piece_bytes, max_document_bytes)
    if spec.kind == "hf":
        from tasks.reading import hub

        pinned, form, found = hub.list_files(spec)
    else:
        pinned, found = _list_files(spec)
        form = spec.kind
    generations = _generations(spec, found, earlier)
    chosen = [entry for generation in generations for entry in generation]
    with ThreadPoolExecutor(_INSPECTORS) as pool:
        parts = list(pool.map(functools.partial(_parts, spec, form), [f for f, _, _ in chosen]))
    total = sum(part.bytes for file_parts in parts for part in file_parts)
    if not total:
        raise UserError(f"corpus {spec} is empty: its {len(chosen)} files hold no documents")
    with ThreadPoolExecutor(_INSPECTORS) as pool:
        states = list(pool.map(_state, [file for file, _, _ in chosen]))
    parts_of = {file.name: parts[number] for number, (file, _, _) in enumerate(chosen)}
    pieces: list[Piece] = []
    for generation in generations:
        target = _piece_size(
            sum(part.bytes for file, _, _ in generation for part in parts_of[file.name]),
            piece_bytes,
        )
        for file, splits, held_out in generation:
            for part in _cut(form, parts_of[file.name], target):
                name = f"{file.name}:{part.start}-{part.stop or ''}"
                pieces.append(
                    Piece(name, splits, part.bytes, held_out, form, file.path, file.name,
                          part.start, part.stop, file.bytes, file.etag)
                )  # fmt: skip
    record = {
        "spec": str(pinned),
        "revision": pinned.revision,
        "column": spec.column,
        "id": spec.id,
        "validation": spec.validation,
        "piece_bytes": piece_bytes,
        "max_document_bytes": max_document_bytes,
        "files": [
            {"name": file.name, "split": file.split, "bytes": file.bytes, **state}
            for (file, _, _), state in zip(chosen, states, strict=True)
        ],
    }
    if len(generations) > 1:
        record["generations"] = list(map(len, generations))
    return Corpus(spec, record, tuple(pieces))


def _piece_size(total: int, piece_bytes: int) -> int:
    return max(1, min(piece_bytes, max(_LEAST_PIECE_BYTES, math.ceil(total / _LEAST_PIECES))))


def _resolve_python_docs(spec: CorpusSpec, piece_bytes: int, max_document_bytes: int) -> Corpus:
    if spec.split not in (TRAIN, VALIDATION):
        raise UserError(f"corpus {spec}: no split {spec.split}; it has train, validation")
    documents = stdlib_docs.documents()
    sizes = {name: len(text.encode()) for name, text in documents.items()}
    splits, held_out = _held_out_splits(spec)
    target = _piece_size(sum(sizes.values()), piece_bytes)
    pieces: list[Piece] = []
    names = iter(documents)
    first = next(names, None)
    while first is not None:
        members, size = [first], sizes[first]
        while (first := next(names, None)) is not None and size + sizes[first] <= target:
            members.append(first)
            size += sizes[first]
        name = f"python_docs:{len(pieces)}"
        pieces.append(Piece(name, splits, size, held_out, "python_docs", members=tuple(members)))
    record = {
        "spec": str(spec),
        "python": stdlib_docs.python_version(),
        "validation": spec.validation,
        "piece_bytes": piece_bytes,
        "max_document_bytes": max_document_bytes,
        "documents": len(documents),
        "bytes": sum(sizes.values()),
        "sha256": stdlib_docs.sha256(),
    }
    return Corpus(spec, record, tuple(pieces))


def _matching(fs: Any, pattern: str) -> dict[str, dict[str, Any]]:
    """What is there of a pattern: path -> what the store says of it.

    Raises:
      FileNotFoundError: nothing.
    """
    with contextlib.suppress(FileNotFoundError):
        return {pattern: fs.info(pattern)}
    found = fs.glob(pattern, detail=True)
    if not found:
        raise FileNotFoundError(pattern)
    return found


def _list_files(spec: CorpusSpec) -> tuple[CorpusSpec, list[SourceFile]]:
    """Returns the spec with its pattern below the fixed folder, and the files that match it."""
    fs, pattern = files.filesystem(spec.location)
    components = pattern.split("/")
    fixed = next((i for i, part in enumerate(components) if re.search(r"[*\[]", part)), -1)
    parts = components[fixed:]
    try:
        found = files.on_store(spec.location, _matching)
    except FileNotFoundError:
        found = {}
    except OSError as error:
        raise UserError(f"{spec.location} cannot be listed: {error}") from error
    if list(found) == [pattern] and found[pattern]["type"] == "directory":
        raise UserError(
            f"{spec.location} is a folder: name its files, as in {spec.kind}:"
            f"{files.join(spec.location, '*')}"
        )
    below = "/".join(parts)
    base = pattern.removesuffix(below)
    listed = []
    for path, info in sorted(found.items()):
        name = path[len(base) :]
        if info["type"] == "file" and not name.rsplit("/", 1)[-1].startswith("."):
            url = fs.unstrip_protocol(path) if files.is_remote(spec.location) else path
            etag, here = files.etag(info), not files.is_remote(spec.location)
            if info["size"] is None:
                raise UserError(f"{url} does not say its size: copy it and name the copy")
            state = {"etag": etag} if etag and not here else {}
            written = etag if here else ""
            listed.append(SourceFile(url, name, _split_of(name), info["size"], state, written))
    if not listed:
        raise UserError(f"no file matches {spec.location}")
    return dataclasses.replace(spec, location=below), listed


def _split_of(name: str) -> str:
    """The split that a file's name says, the innermost folder first; train where none does."""
    for component in reversed(name.lower().split("/")):
        for word in re.findall(r"[^-._ 0-9]+", component):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return TRAIN


def _held_out_splits(spec: CorpusSpec) -> tuple[tuple[str, ...], bool]:
    """Splits of a piece of train, and whether a hash decides, when all validation is held out."""
    if spec.split == VALIDATION:
        if not spec.validation:
            raise UserError(f"corpus {spec} has no validation, and validation=0 holds none out")
        return (VALIDATION,), True
    return ((TRAIN, VALIDATION), True) if spec.validation else ((TRAIN,), False)


def _choose(
    spec: CorpusSpec, found: list[SourceFile]
) -> list[tuple[SourceFile, tuple[str, ...], bool]]:
    """Files to read, each with the splits that its documents go to and whether a hash decides."""
    own = [(file, (VALIDATION,), False) for file in found if file.split == VALIDATION]
    if own and spec.split == VALIDATION:
        return list(own)
    source = TRAIN if spec.split == VALIDATION else spec.split
    splits, held_out = ((TRAIN,), False) if own else _held_out_splits(spec)
    chosen = [(file, splits, held_out) for file in found if file.split == source]
    if not chosen:
        names = ", ".join(sorted({file.split for file in found}))
        raise UserError(f"corpus {spec} has no split {source}; it has {names}: add ?split=NAME")
    return [*chosen, *own]


def _generations(
    spec: CorpusSpec, found: list[SourceFile], earlier: Sequence[Sequence[str]]
) -> list[list[tuple[SourceFile, tuple[str, ...], bool]]]:
    """Files to read, as `_choose`, by generation: those named in `earlier`, then the others."""
    chosen = _choose(spec, found)
    known = {name for names in earlier for name in names}
    if not known or not known <= {file.name for file in found}:
        return [chosen]
    before = _choose(spec, [file for file in found if file.name in known])
    if before != [entry for entry in chosen if entry[0].name in known]:
        raise UserError(
            f"corpus {spec}: with the files that are new, documents of the old ones would move "
            "between train and validation: build a new cache in another --cache_dir"
        )
    new = [entry for entry in chosen if entry[0].name not in known]
    old = [[entry for entry in before if entry[0].name in names] for names in earlier]
    return [*old, new] if new else old


def _state(file: SourceFile) -> dict[str, str]:
    if file.state:
        return file.state
    if files.is_remote(file.path):
        return {}
    with readers.reading(file.path):
        return {"sha256": files.sha256(file.path)}


@dataclasses.dataclass(frozen=True)
class _Part:
    """A stretch of a file that can be read by itself: bytes or rows from start to stop."""

    start: int
    stop: int | None
    bytes: int


def _parts(spec: CorpusSpec, form: str, file: SourceFile) -> list[_Part]:
    """The file as one stretch of bytes, or its row groups; checks the columns."""
    if form != "parquet":
        if form == "json" and file.bytes:
            _check_json(spec, file)
        end = None if file.path.endswith(readers.COMPRESSED) else file.bytes
        return [_Part(0, end, file.bytes)] if file.bytes else []
    import pyarrow as pa

    with (
        readers.reading(file.path),
        readers.open_file(file.path, file.bytes, file.etag, ahead=0) as handle,
    ):
        parquet = readers.open_parquet(handle, file.path)
        schema = parquet.schema_arrow
        for column in filter(None, (spec.column, spec.id)):
            if column not in schema.names:
                raise _missing_column(file.path, column, schema.names)
        kind = schema.field(spec.column).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not _is_text(kind):
            raise UserError(f"{file.path}: column {spec.column} is {kind}, not text")
        parts = []
        row = 0
        for index in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(index)
            size = readers.column_bytes(group, spec.column)
            if group.num_rows:
                parts.append(_Part(row, row + group.num_rows, size))
            row += group.num_rows
    return parts


def _is_text(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    types = pa.types
    text = (types.is_string, types.is_large_string, types.is_string_view)
    raw = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(test(kind) for test in (*text, *raw, types.is_null))


def _missing_column(path: str, column: str, there: list[str]) -> UserError:
    names = ", ".join(there)
    return UserError(
        f"{path} has no column {column}{nearest(column, there)}; it has {names}: add ?column=NAME"
    )


def _cut(form: str, parts: list[_Part], target: int) -> Iterator[_Part]:
    """Cuts stretches evenly into pieces of at most `target` bytes; joins small row groups to such.

    Where a piece of rows begins inside a row group, its reader decodes those before it in vain.
    """
    joined: _Part | None = None
    for part in parts:
        for cut in _evenly(part, target, rows=form == "parquet"):
            if form == "parquet" and joined and joined.bytes + cut.bytes <= target:
                joined = _Part(joined.start, cut.stop, joined.bytes + cut.bytes)
            else:
                if joined:
                    yield joined
                joined = cut
    if joined:
        yield joined


def _evenly(part: _Part, target: int, rows: bool) -> Iterator[_Part]:
    if part.stop is None:  # compressed
        yield part
        return
    length = part.stop - part.start
    count = max(1, min(length, math.ceil(part.bytes / target)))
    cuts = [part.start + length * i // count for i in range(count + 1)]
    for start, stop in itertools.pairwise(cuts):
        size = part.bytes * (stop - start) // length if rows else stop - start
        yield _Part(start, stop, size)


def read(
    corpus: Corpus, piece: Piece, batch_documents: int = 1024
) -> Iterator[tuple[str, "pa.RecordBatch"]]:
    """Yields (split, batch) until the piece is read.

    Columns of a batch: `id` string, `text` string or large_string, `problem` string, `part` int32.
    A document that cannot be used has a null text and a problem: "null", "not a string", "invalid
    UTF-8", "invalid JSON", "missing column" or "longer than 1 GiB" (a line of JSON). Batches have
    at most `batch_documents` documents and, unless one document is larger, about 4 MB.

    A document longer than the corpus's `max_document_bytes` comes as several, of one split, cut at
    white space (`readers` has the rule): `part` counts them from 1, and is 0 for whole documents.
    The first keeps the id, others have "ID#part2" and so on. A part of a line of text that is not
    UTF-8 is left out alone; a value of JSON or Parquet is left out whole.

    Raises:
      UserError: the file cannot be read to its end (it is gone, changed, truncated or corrupt).
    """
    # The first eight bytes of a hash, as a number, against the share of all such numbers.
    share = int(corpus.spec.validation * 2**64).to_bytes(8)
    with (
        readers.reading(piece.path),
        contextlib.closing(_batches(corpus, piece, batch_documents)) as got,
    ):
        for batch in got:
            if not piece.held_out:
                yield piece.splits[0], batch
                continue
            held = [hashlib.sha256(id.encode()).digest() < share for id in _base_ids(batch)]
            for split in piece.splits:
                rows = [i for i, is_held in enumerate(held) if is_held == (split == VALIDATION)]
                if rows:
                    yield split, batch if len(rows) == batch.num_rows else batch.take(rows)
        # Cut short while it was open, it merely seemed to end: the shard must not be finished.
        if piece.path and not files.is_remote(piece.path):
            readers.check_unchanged(piece.path, piece.file_bytes, piece.etag)


def _base_ids(batch: "pa.RecordBatch") -> list[str]:
    """Ids of the documents, the same for all parts of one."""
    ids = batch.column("id").to_pylist()
    for row, part in enumerate(batch.column("part").to_pylist()):
        if part > 1:
            ids[row] = ids[row].removesuffix(f"#part{part}")
    return ids


def _batches(corpus: Corpus, piece: Piece, count: int) -> readers.Batches:
    if piece.format == "parquet":
        return readers.read_parquet(corpus, piece, count)
    if piece.format != "python_docs":
        return readers.read_lines(corpus, piece, count)
    if corpus.record["sha256"] != stdlib_docs.sha256():
        raise UserError(
            f"the corpus python_docs is that of Python {corpus.record['python']}, but here "
            f"runs {stdlib_docs.python_version()} or another build of it"
        )
    texts = stdlib_docs.documents()
    documents = ((name, texts[name], None, 0) for name in piece.members)
    return readers.collect(documents, count, corpus.max_document_bytes)


def _check_json(spec: CorpusSpec, file: SourceFile) -> None:
    """Looks at the first lines of a file of JSON lines for the columns, and that one is text."""
    with (
        readers.reading(file.path),
        readers.open_file(file.path, file.bytes, file.etag, _PEEK_BYTES) as handle,
        readers.decompress(handle, file.path) as stream,
    ):
        head = stream.read(_PEEK_BYTES)
        cut_short = len(head) == _PEEK_BYTES or stream.read(1)
    lines = head.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    lines = [line for line in (lines[:-1] if cut_short else lines) if line.strip()]
    if not lines:  # or one long line: what it is will be seen when it is read
        return
    rows = []
    for line in lines[:_PEEK_LINES]:
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line)
            rows += [value] if isinstance(value, dict) else []
    if not rows:
        raise UserError(f"{file.path} is not JSON lines: its first lines hold no JSON object")
    for column in filter(None, (spec.column, spec.id)):
        if not any(column in row for row in rows):
            raise _missing_column(file.path, column, sorted(set().union(*rows)))
    kinds = {type(row[spec.column]) for row in rows if spec.column in row} - {type(None)}
    if kinds and str not in kinds:
        names = ", ".join(sorted(_JSON_KINDS[kind] for kind in kinds))
        raise UserError(f"{file.path}: column {spec.column} is {names}, not text")
