"""Corpora of random words, searches in them, and what these list."""

import hashlib
import json
import random

from pipeline.annexes.deduplication import dedup
from pipeline.exclusion.lists import ExcludeList, id_digests


def words(count, seed):
    generator = random.Random(seed)
    return [f"w{generator.randrange(10**6)}" for _ in range(count)]


def write(path, texts, named=True) -> str:
    lines = [
        json.dumps({"id": name, "text": text} if named else {"text": text}) for name, text in texts
    ]
    path.write_text("\n".join(lines) + "\n")
    return f"json:{path}"


def search(corpus, output, *flags) -> ExcludeList:
    dedup.main([f"--corpus={corpus}", f"--output={output}", *flags])
    return ExcludeList(str(output / "exclude.arrow"))


def entries(found: ExcludeList, names) -> dict[str, tuple[str, str]]:
    """Returns (reason, twin) by id; every entry must be of one of the names."""
    by_digest = {tuple(map(int, digest)): name for name, digest in
                 zip(names, id_digests(names), strict=True)}  # fmt: skip
    rows = list(found)
    named = {by_digest[row["high"], row["low"]]: (row["reason"], row["twin"]) for row in rows}
    assert len(named) == len(rows)
    return named


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()
