"""In a bucket, a build lists its folder instead of asking for each shard by itself."""

import dataclasses
import json
import types
from collections import Counter

import pytest

from pipeline.building import lifecycle
from pipeline.building.graph import Assignment
from pipeline.building.monitor import Monitor
from tasks.cache.manifest import FileEntry, Plan, Shard, shard_file
from tasks.vocabulary import VocabularyRecord
from tests.support.servers.gcs import GcsServer

pytestmark = [pytest.mark.google, pytest.mark.processes]

SHARDS = 50
FOLDER = "gs://bucket/cache/python_docs_span_corruption"
RECORD = VocabularyRecord("0" * 64, 0, 8000, 100)
PLAN = Plan("python_docs_span_corruption", {}, RECORD, "concat", 141, "none", {"train": SHARDS})


def kind(request):
    """Returns what a request does, "" for others, such as those for a token."""
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


def fill(gcs):
    """Puts finished shards into the bucket, with contents that are made up."""

    def put(name, data):
        gcs.store.put("bucket", f"{FOLDER.partition('bucket/')[2]}/{name}", data, {}, {})

    for index in range(SHARDS):
        kinds = ("tfrecord", "rows", "documents")
        names = [shard_file("train", each, index, SHARDS) for each in kinds]
        for name in names:
            put(name, b"made up")
        entries = {name: FileEntry(7, "0" * 64) for name in names}
        shard = Shard(entries, 1, 141, 1, 600, {}, 141, 141, 0)
        receipt = json.dumps(dataclasses.asdict(shard)).encode()
        put(shard_file("train", "receipt", index, SHARDS), receipt)


@pytest.fixture(scope="module")
def steps():
    """Returns a dict: step of a build -> number of requests by kind."""
    import fsspec
    import gcsfs

    keys = [("train", index) for index in range(SHARDS)]
    piece = types.SimpleNamespace(bytes=600)  # the rest of a piece is for its worker
    work = [Assignment(piece, (key,)) for key in keys]
    found = {}
    with pytest.MonkeyPatch.context() as patch, GcsServer() as gcs:
        for name, value in gcs.environment().items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf, "gcs", {"token": "anon"})

        def measure(name, action):
            gcs.requests.clear()
            action()
            found[name] = Counter(filter(None, map(kind, gcs.requests)))

        measure("survey, nothing there", lambda: lifecycle.survey(FOLDER, PLAN))
        measure("invalidate, nothing there", lambda: lifecycle.invalidate(FOLDER, PLAN, keys))
        fill(gcs)
        measure("survey, all finished", lambda: lifecycle.survey(FOLDER, PLAN))
        measure("a look of the monitor", lambda: Monitor(FOLDER, PLAN, {}, work).look())
        measure("invalidate, all finished", lambda: lifecycle.invalidate(FOLDER, PLAN, keys))
    gcsfs.GCSFileSystem.clear_instance_cache()
    return found


def test_each_receipt_is_read_and_deleted_once(steps):
    """Sizes come with the listing."""
    for step in ("survey", "invalidate"):
        assert sum(steps[f"{step}, nothing there"].values()) <= 6
    for step in ("survey, all finished", "a look of the monitor"):
        assert steps[step]["read"] == SHARDS
        assert steps[step]["list"] <= 4
        assert steps[step]["look up"] <= 1
    counts = steps["invalidate, all finished"]
    assert counts["delete"] == SHARDS + 2
    assert sum(counts.values()) <= SHARDS + 6, counts
