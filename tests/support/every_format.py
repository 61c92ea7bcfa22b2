"""The same documents in a file of every format that has ids, for tests of all of them."""

import gzip
import pathlib
from collections.abc import Mapping

from tests.faults.corpora import encoded


def write(folder: pathlib.Path, rows: Mapping[str, str]) -> dict[str, str]:
    """Writes texts by id in every format; returns SPECs without options, {format: SPEC}."""
    columns = [{"id": name, "text": text} for name, text in rows.items()]
    contents = {
        ("json", "a.jsonl"): encoded("json", columns),
        ("csv", "a.csv"): encoded("csv", columns),
        ("csv.gz", "a.csv.gz"): gzip.compress(encoded("csv", columns), mtime=0),
        ("tsv", "a.tsv"): encoded("tsv", columns),
        ("parquet", "a.parquet"): encoded("parquet", columns),
        ("arrow stream", "a.arrow"): encoded("arrow", columns),
        ("arrow file", "a.feather"): encoded("feather", columns),
        ("wet", "a.warc.wet.gz"): encoded("wet", columns),
    }
    for (_, name), data in contents.items():
        (folder / name).write_bytes(data)
    return {
        kind: f"{kind.split()[0].split('.')[0]}:{folder}/{name}" + "?quote=%22&" * (kind == "tsv")
        for kind, name in contents
    }
