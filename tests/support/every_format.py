"""The same documents in a file of every format that has ids, for tests of all of them."""

import csv
import gzip
import io
import json
import pathlib
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq


def _delimited(rows: Mapping[str, str], delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerows([("id", "text"), *rows.items()])
    return out.getvalue().encode()


def _wet(rows: Mapping[str, str]) -> bytes:
    members = []
    for name, text in rows.items():
        block = text.encode()
        headers = f"WARC-Type: conversion\r\nWARC-Record-ID: {name}\r\nContent-Length: {len(block)}"
        record = f"WARC/1.0\r\n{headers}\r\n\r\n".encode() + block + b"\r\n\r\n"
        members.append(gzip.compress(record, mtime=0))
    return b"".join(members)


def _arrow(rows: Mapping[str, str], kind: str) -> bytes:
    table = pa.table({"id": list(rows), "text": list(rows.values())})
    out = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, out, row_group_size=300)
        return out.getvalue()
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    with new(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return out.getvalue()


def write(folder: pathlib.Path, rows: Mapping[str, str]) -> dict[str, str]:
    """Writes texts by id in every format; returns SPECs without options, {format: SPEC}."""
    lines = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in rows.items())
    contents = {
        ("json", "a.jsonl"): lines.encode(),
        ("csv", "a.csv"): _delimited(rows, ","),
        ("csv.gz", "a.csv.gz"): gzip.compress(_delimited(rows, ","), mtime=0),
        ("tsv", "a.tsv"): _delimited(rows, "\t"),
        ("parquet", "a.parquet"): _arrow(rows, "parquet"),
        ("arrow stream", "a.arrow"): _arrow(rows, "stream"),
        ("arrow file", "a.feather"): _arrow(rows, "file"),
        ("wet", "a.warc.wet.gz"): _wet(rows),
    }
    for (_, name), data in contents.items():
        (folder / name).write_bytes(data)
    return {
        kind: f"{kind.split()[0].split('.')[0]}:{folder}/{name}" + "?quote=%22&" * (kind == "tsv")
        for kind, name in contents
    }
