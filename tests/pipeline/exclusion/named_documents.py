"""Corpora of documents with a name in their text, their builds, and the names that caches hold."""

import itertools
import json
import pathlib
import re

import pytest

from pipeline.build import main
from tests.support.plain_records import read_rows

LANGUAGES = ("en", "ro")


def text(name: str) -> str:
    return f"<{name}> " + " ".join(f"{name}w{number}" for number in range(20))


def write(folder: pathlib.Path, language: str, twins: dict[str, str], **ids) -> None:
    """Writes ten documents, some with the text of another; a row is called LANGUAGE and number."""
    path = folder / language / "data.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(10):
        name = f"{language}{number}"
        # A twin differs in case, so that one reads which of both a cache holds.
        row = {"text": text(twins[name]).upper() if name in twins else text(name)}
        rows.append({**({"id": f"doc{number}"} if ids.get("ids") else {}), **row})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def build(tmp_path):
    def run(pattern, *more, name="x", cache_dir=tmp_path / "caches"):
        main([
            "--task=lm", f"--name={name}", f"--corpus=json:{pattern}?validation=0",
            "--vocabulary=bytes", "--extra_ids=100", f"--cache_dir={cache_dir}",
            "--row_tokens=64", "--shard_bytes=500", *more,
        ])  # fmt: skip
        return cache_dir

    return run


def held(cache_dir: pathlib.Path) -> set[str]:
    """Returns the names of all documents in the records of caches, in capitals if of a twin."""
    data = b""
    for path in sorted(cache_dir.glob("*/*.tfrecord-*")):
        rows = read_rows(path.read_bytes())
        tokens = itertools.chain.from_iterable(row["targets"] for row in rows)
        data += bytes(token - 3 for token in tokens if token > 2)
    return set(re.findall("<([A-Za-z0-9]+)>", data.decode()))
