"""Takes 100 random documents of 100,000 out of a finished cache, and compares the others.

    python -m benchmarks.takedown --corpus='parquet:text.parquet'

The documents are passages of the corpus, in a cache of bytes. After the takedown every shard is
read: the tokens of the other documents must be those of before, files of shards without a listed
document must be the same files, and `pipeline.verify --exclude` must prove absence.
"""

import contextlib
import hashlib
import io
import json
import pathlib
import random
import tempfile
import time

from benchmarks.dedup import documents
from benchmarks.machine import machine
from pipeline import build, verify
from pipeline.reporting.findings import read_shard
from tasks.cache.manifest import CacheManifest
from tasks.terminal.command_line import Parser, positive


def tokens_of(folder: pathlib.Path) -> dict[str, str]:
    """Returns a digest of the tokens of every document of a cache, by its id."""
    manifest = CacheManifest.load(str(folder))
    found = {}
    for split, shards in manifest.splits.items():
        for index in range(len(shards)):
            for name, tokens in read_shard(str(folder), manifest, split, index).documents():
                found[name] = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
    return found


def main() -> None:
    """Runs the command; exits with an error if a document has changed."""
    parser = Parser(prog="python -m benchmarks.takedown", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--corpus", default="python_docs", help="corpus SPEC to cut documents from")
    add("--documents", type=positive, default=100_000, help="number of documents")
    add("--words", type=positive, default=25, help="words of a document")
    add("--listed", type=positive, default=100, help="documents to take out")
    add("--shard_bytes", default="131072", help="as of pipeline.build")
    flags = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch)
        count = _write(flags, path / "corpus.jsonl")
        given = [
            *("--task=span_corruption", "--name=taken", "--vocabulary=bytes", "--extra_ids=100"),
            *(f"--corpus=json:{path}/corpus.jsonl", f"--cache_dir={path}"),
            f"--shard_bytes={flags.shard_bytes}",
        ]
        cache = path / "taken_span_corruption"
        _quietly(build.main, given)
        before = tokens_of(cache)
        inodes = {each.name: each.stat().st_ino for each in cache.glob("*.tfrecord-*")}
        listed = random.Random(0).sample(sorted(before), flags.listed)
        (path / "ids.txt").write_text("\n".join(listed))
        holding = _holding(cache, set(listed))
        started = time.monotonic()
        _quietly(build.main, [*given, f"--exclude={path}/ids.txt"])
        seconds = time.monotonic() - started
        assert not verify.main([f"--cache={cache}", f"--exclude={path}/ids.txt"])
        after = tokens_of(cache)
        assert after == {name: each for name, each in before.items() if name not in set(listed)}
        rewritten = {
            each.name
            for each in cache.glob("*.tfrecord-*")
            if each.stat().st_ino != inodes[each.name]
        }
        assert holding <= rewritten
        print(
            f"{count:,} documents in {len(inodes):,} shards; {len(listed):,} taken out in "
            f"{seconds:.1f} s: {len(holding):,} shards held one, {len(rewritten):,} were written "
            f"anew; the tokens of all {len(after):,} others are unchanged"
        )


def _write(flags, path: pathlib.Path) -> int:
    count = 0
    with path.open("w") as file:
        for _, text in documents(flags.corpus):
            words = (text or "").split()
            for start in range(0, len(words) - flags.words + 1, flags.words):
                passage = " ".join(words[start : start + flags.words])
                file.write(json.dumps({"id": f"document {count}", "text": passage}) + "\n")
                count += 1
                if count == flags.documents:
                    return count
    return count


def _holding(cache: pathlib.Path, listed: set[str]) -> set[str]:
    from pyarrow import parquet

    return {
        path.name.replace("documents", "tfrecord").removesuffix(".parquet")
        for path in cache.glob("*.documents-*")
        if listed & set(parquet.read_table(path, columns=["id"]).column("id").to_pylist())
    }


def _quietly(command, arguments: list[str]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        command(arguments)


if __name__ == "__main__":
    main()
