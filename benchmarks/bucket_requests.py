"""Counts the requests of builds in a bucket, on the local server of tests/support/servers/gcs.py.

    python -m benchmarks.bucket_requests --vocabulary=DIR [--shards=10000] [--latency=0.0]

First a corpus is built, built again after some receipts were deleted, and built once more. Then
each step of a build is measured alone in a folder of so many finished shards, which are never
built: their receipts and files are made up.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator

from benchmarks.machine import machine
from tasks.terminal.command_line import Parser, positive, run
from tasks.terminal.table import table
from tests.support.servers.gcs import GcsServer, Request

KINDS = ("list", "look up", "read", "write", "delete")
_FOLDER = "gs://bucket/cache/python_docs_span_corruption"


def kind(request: Request) -> str:
    """Returns which of KINDS a request is, "" for others, such as those for a token."""
    path, _, query = request.path.partition("?")
    if request.method == "DELETE":
        return "delete"
    if request.method in ("POST", "PUT"):
        return "write" if "/upload/" in path else ""
    if path.rstrip("/").endswith("/o"):
        return "list"
    if "/o/" in path:
        return "read" if "alt=media" in query else "look up"
    return ""


def phases(requests: list[Request]) -> Iterator[tuple[str, list[Request]]]:
    """Yields the requests before the first shard is written, until the last receipt, and after."""

    def is_of(word: str) -> Callable[[Request], bool]:
        return lambda each: kind(each) == "write" and word in each.path

    first = next((n for n, each in enumerate(requests) if is_of(".tfrecord-")(each)), None)
    if first is None:
        yield "in all", requests
        return
    last = max(n for n, each in enumerate(requests) if is_of(".receipt-")(each))
    yield "before the job", requests[:first]
    yield "job", requests[first : last + 1]
    yield "after the job", requests[last + 1 :]


def _row(*name: str, requests: list[Request]) -> tuple[str, ...]:
    counts = Counter(map(kind, requests))
    return (*name, *(f"{counts[each]:,}" for each in KINDS))


def builds(gcs: GcsServer, vocabulary: str) -> list[tuple[str, ...]]:
    """Returns the table's rows of a fresh, a resumed and a finished build."""
    command = [
        *(sys.executable, "-m", "pipeline.build", "--task=python_docs_span_corruption"),
        *(f"--vocabulary={vocabulary}", "--cache_dir=gs://bucket/cache", "--row_tokens=141"),
        "--shard_bytes=100000",
    ]
    rows = []
    for name in ("fresh", "resumed", "finished"):
        if name == "resumed":
            receipts = [each for each in gcs.names() if ".receipt-" in each]
            for each in receipts[::2]:
                gcs.store.delete("bucket", each, {})
        gcs.requests.clear()
        done = subprocess.run(
            command, env={**os.environ, **gcs.environment()}, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(done.stderr)
        shards = sum(".receipt-" in each for each in gcs.names())
        for phase, requests in phases(list(gcs.requests)):
            rows.append(_row(f"{name}, {shards} shards", phase, "", requests=requests))
    return rows


def steps(gcs: GcsServer, count: int) -> list[tuple[str, ...]]:
    """Returns the table's rows of the steps of a build of `count` shards."""
    import fsspec

    fsspec.config.conf["gcs"] = {"token": "anon"}
    from pipeline.building import lifecycle
    from pipeline.building.graph import Assignment
    from pipeline.building.monitor import Monitor
    from tasks.cache.manifest import FileEntry, Plan, Shard, shard_file
    from tasks.vocabulary import VocabularyRecord

    record = VocabularyRecord("0" * 64, 0, 8000, 100)
    plan = Plan("python_docs_span_corruption", {}, record, "concat", 141, "none", {"train": count})

    def put(name: str, data: bytes) -> None:
        gcs.store.put("bucket", f"{_FOLDER.partition('bucket/')[2]}/{name}", data, {}, {})

    def fill() -> None:
        for index in range(count):
            names = [
                shard_file("train", k, index, count) for k in ("tfrecord", "rows", "documents")
            ]
            for name in names:
                put(name, b"made up")
            entries = {name: FileEntry(7, "0" * 64) for name in names}
            shard = Shard(entries, 1, 141, 1, 600, {}, 141, 141)
            put(
                shard_file("train", "receipt", index, count),
                json.dumps(dataclasses.asdict(shard)).encode(),
            )

    keys = [("train", index) for index in range(count)]
    piece = types.SimpleNamespace(bytes=600)  # the rest of a piece is for its worker
    work = [Assignment(piece, (key,)) for key in keys]
    rows = []

    def measure(name: str, action: Callable) -> object:
        gcs.requests.clear()
        begin = time.monotonic()
        result = action()
        seconds = f"{time.monotonic() - begin:,.1f}"
        rows.append(_row(f"{count:,} shards", name, seconds, requests=list(gcs.requests)))
        return result

    measure("survey, nothing there", lambda: lifecycle.survey(_FOLDER, plan))
    measure("invalidate, nothing there", lambda: lifecycle.invalidate(_FOLDER, plan, keys))
    fill()
    shards = measure("survey, all finished", lambda: lifecycle.survey(_FOLDER, plan))
    measure("a look of the monitor", lambda: Monitor(_FOLDER, plan, {}, work).look())
    measure("complete", lambda: lifecycle.complete(_FOLDER, plan, shards))
    measure("invalidate, all finished", lambda: lifecycle.invalidate(_FOLDER, plan, keys))
    return rows


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(
        prog="python -m benchmarks.bucket_requests", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--vocabulary", help="build with this vocabulary first")
    parser.add_argument("--shards", type=positive, default=10_000, help="of the made-up cache")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of each response")
    flags = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        gcs = stack.enter_context(GcsServer(latency_seconds=flags.latency))
        rows = builds(gcs, flags.vocabulary) if flags.vocabulary else []
        os.environ.update(gcs.environment())
        rows += steps(gcs, flags.shards)
    print(machine())
    print(table(("build", "step", "seconds", *KINDS), rows, markdown=True))


if __name__ == "__main__":
    run(main)
