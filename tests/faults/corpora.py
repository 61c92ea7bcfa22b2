"""Writes the documents of a corpus again, as files of any format that has columns."""

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence

FORMATS = ("json", "parquet", "csv", "tsv", "arrow", "wet")
_ENDINGS = {"json": "jsonl", "wet": "warc.wet.gz"}

Row = dict[str, str]


def file_name(form: str, number: int) -> str:
    """Returns the name of a file of a format."""
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
    """Returns a record of a WET file, compressed by itself."""
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
