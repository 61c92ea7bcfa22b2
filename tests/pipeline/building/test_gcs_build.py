"""A build from bucket to bucket has the bytes of a local build, even if requests fail."""

import json
import os

import pytest

from pipeline import verify
from tasks.cache.manifest import PLAN_MARK
from tasks.storage import files
from tests.support.plain_records import without_plan
from tests.support.servers.gcs import FAULTS, GcsServer

pytestmark = [pytest.mark.google, pytest.mark.processes]

TASK = "python_docs_span_corruption"
# Keys of the plan's corpus record that name files, or come from the store.
OF_PLACES = {"plan.json", "manifest.json"}


@pytest.fixture
def in_store(documents, vocabulary, cache):
    """Returns a function that copies the corpus and vocabulary of `cache` to a server."""

    def fill(gcs):
        lines = [json.dumps({"id": name, "text": text}) for name, text in documents.items()]
        gcs.store.put("bucket", "corpus/documents.jsonl", "\n".join(lines).encode(), {}, {})
        for path in vocabulary.iterdir():
            gcs.store.put("bucket", f"vocabulary/{path.name}", path.read_bytes(), {}, {})

    return fill


def names(listed) -> list[str]:
    """Returns the sorted names of files, without the mark that is named after the plan."""
    return sorted(name for name in listed if not name.startswith(PLAN_MARK))


FLAGS = (
    "--corpus=json:gs://bucket/corpus/*.jsonl?validation=0.1",
    "--vocabulary=gs://bucket/vocabulary",
)


def test_a_build_in_a_failing_bucket_has_the_same_bytes(build, cache, in_bucket, in_store, capsys):
    with GcsServer(faults=0.1, seed=2) as gcs:
        in_bucket(gcs)
        in_store(gcs)
        folder = f"gs://bucket/cache/{TASK}"
        build("gs://bucket/cache", *FLAGS)
        assert names(files.list_names(folder)) == names(os.listdir(cache))
        for path in cache.iterdir():
            there = gcs.read(f"cache/{TASK}/{path.name}") if path.name[0] != "." else b""
            if ".receipt-" in path.name:
                assert without_plan(there) == without_plan(path.read_bytes())
            elif path.name not in OF_PLACES and not path.name.startswith(PLAN_MARK):
                assert there == path.read_bytes(), path.name
        here = json.loads((cache / "manifest.json").read_text())
        there = json.loads(gcs.read(f"cache/{TASK}/manifest.json"))
        assert there["splits"] == here["splits"]
        capsys.readouterr()
        build("gs://bucket/cache", *FLAGS)
        assert "nothing to do" in capsys.readouterr().out
        assert not verify.main([f"--cache={folder}"])

        shard = next(name for name in gcs.names() if "train.tfrecord" in name)
        whole = gcs.read(shard)
        gcs.store.put("bucket", shard, whole[:-1], {}, {})
        build("gs://bucket/cache", *FLAGS)
        assert gcs.read(shard) == whole
        assert set(gcs.counts()) == {"", *FAULTS}
