"""Small corpora: files of every format that has columns, and the documents read of a SPEC."""

import csv
import gzip
import io
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tasks.reading import sources
from tasks.reading.formats.registry import FORMATS as KINDS


def known(*forms: str) -> list[str]:
    """Returns those of the formats, such as csv or csv.gz, that this checkout reads."""
    return [form for form in forms if _kind(form) in KINDS]


def _kind(form: str) -> str:
    return form.split()[0].split(".")[0]


FORMATS = known("json", "parquet", "csv", "tsv", "arrow", "wet")
# Names of `in_every_format`, each a kind and how its files are.
IN_EVERY_FORMAT = known(
    *("json", "csv", "csv.gz", "tsv", "parquet", "arrow stream", "arrow file", "wet")
)
_ENDINGS = {"json": "jsonl", "wet": "warc.wet.gz"}

# A sentence whose pieces a cut vocabulary keeps.
KEPT = "the list of items is the one that the command reads from the file"
Row = dict[str, str]


def file_name(form: str, number: int) -> str:
    return f"part-{number:03d}.{_ENDINGS.get(form, form)}"


def spec(form: str, folder: str) -> str:
    """Returns the SPEC of all such files in a folder, up to its options, which follow."""
    quoted = "quote=%22&" if form == "tsv" else ""
    return f"{form}:{folder}/*.{_ENDINGS.get(form, form)}?{quoted}"


def encoded(form: str, rows: Sequence[Row]) -> bytes:
    """Returns the bytes of a file with rows of the same columns."""
    if not rows:
        return b""
    writers: dict[str, Callable[[Sequence[Row]], bytes]] = {
        "json": lambda rows: b"".join(json.dumps(row).encode() + b"\n" for row in rows),
        "csv": lambda rows: _delimited(rows, ","),
        "tsv": lambda rows: _delimited(rows, "\t"),
        "wet": lambda rows: b"".join(map(_member, rows)),
    }
    return writers[form](rows) if form in writers else _columns(rows, form)


def _delimited(rows: Sequence[Row], delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return out.getvalue().encode()


def _member(row: Row) -> bytes:
    block = row["text"].encode()
    headers = {"WARC-Type": "conversion", "WARC-Record-ID": row["id"], "Content-Length": len(block)}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return gzip.compress(b"WARC/1.0\r\n" + lines.encode() + b"\r\n" + block + b"\r\n\r\n", mtime=0)


def _columns(rows: Sequence[Row], form: str) -> bytes:
    """Returns a file of Parquet or of an Arrow stream, with several stretches of rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table, out = pa.Table.from_pylist(list(rows)), io.BytesIO()
    if form == "parquet":
        pq.write_table(table, out, row_group_size=200)
    else:
        new = pa.ipc.new_file if form == "feather" else pa.ipc.new_stream
        with new(out, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    return out.getvalue()


def write_json(path: pathlib.Path, rows: Mapping[str, Any] | Iterable[Any]) -> str:
    """Writes JSON lines of rows, of texts by id, or of texts alone; returns the SPEC."""
    if isinstance(rows, Mapping):
        rows = [{"id": name, "text": text} for name, text in rows.items()]
    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.write_text("\n".join(map(json.dumps, rows)))
    return f"json:{path}"


def in_every_format(folder: pathlib.Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Writes texts by id in every format with ids; returns {format: SPEC without options}."""
    rows = [{"id": name, "text": text} for name, text in texts.items()]
    contents = {
        ("json", "a.jsonl"): encoded("json", rows),
        ("csv", "a.csv"): encoded("csv", rows),
        ("csv.gz", "a.csv.gz"): gzip.compress(encoded("csv", rows), mtime=0),
        ("tsv", "a.tsv"): encoded("tsv", rows),
        ("parquet", "a.parquet"): encoded("parquet", rows),
        ("arrow stream", "a.arrow"): encoded("arrow", rows),
        ("arrow file", "a.feather"): encoded("feather", rows),
        ("wet", "a.warc.wet.gz"): encoded("wet", rows),
    }
    for (_, name), data in contents.items():
        (folder / name).write_bytes(data)
    return {
        form: f"{_kind(form)}:{folder}/{name}" + "?quote=%22&" * (form == "tsv")
        for form, name in contents
        if form in IN_EVERY_FORMAT
    }


def pieces_and_rows(
    spec: str, piece_bytes: int = 64 << 20, count: int = 1024, **how: Any
) -> tuple[Sequence[sources.Piece], list[dict[str, Any]]]:
    """Returns a corpus's pieces, and its documents in their order, each with its split.

    `count` is the most documents of a batch; `how` are further arguments of `sources.resolve`.
    """
    corpus = sources.resolve(sources.parse(spec), piece_bytes, **how)
    found = [
        {"split": split, **row}
        for piece in corpus.pieces
        for split, batch in sources.read(corpus, piece, count)
        for row in batch.to_pylist()
    ]
    return corpus.pieces, found


def read(spec: str, *how: Any, **more: Any) -> list[dict[str, Any]]:
    """Returns the documents of a corpus; see `pieces_and_rows`."""
    return pieces_and_rows(spec, *how, **more)[1]


def written(tmp_path):
    """Writes a corpus and returns its SPEC."""
    lines = [json.dumps({"id": str(n), "text": f"{KEPT} {n % 2}"}) for n in range(9)]
    (tmp_path / "kept.jsonl").write_text("\n".join(lines))
    return f"json:{tmp_path}/kept.jsonl"
