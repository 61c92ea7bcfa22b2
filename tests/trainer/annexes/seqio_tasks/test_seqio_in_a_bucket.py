"""Stock seqio reads a cache in a bucket."""

import json
import os

import pytest

from tests.support.processes import started
from tests.support.runs import TASK
from tests.support.servers.gcs import GcsServer

pytestmark = [pytest.mark.google, pytest.mark.processes]

SEQIO = """
import seqio
from trainer.annexes.seqio_tasks import catalogue
catalogue.register("gs://bucket/vocabulary", corpus="python_docs")
seqio.add_global_cache_dirs(["gs://bucket/caches"])
task = seqio.get_mixture_or_task("python_docs_span_corruption")
rows = task.get_dataset({"inputs": 64, "targets": 18}, split="train", use_cached=True,
    shuffle=False, seed=1, shard_info=seqio.ShardInfo(0, 1))
print(sum(1 for _ in rows))
"""


@pytest.mark.slow
def test_stock_seqio_reads_a_cache_in_a_bucket(text_cache, tmp_path):
    from tasks.cache.manifest import CacheManifest

    with GcsServer(tls=tmp_path / "tls") as gcs:
        gcs.store.fill(text_cache, f"caches/{TASK}")
        gcs.store.fill(text_cache.parents[1] / "vocabulary", "vocabulary")
        done = started("-c", SEQIO, env=os.environ | gcs.environment(), timeout=500)  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens = CacheManifest.load(str(text_cache)).total("train", "tokens")
    window = json.loads(done.stdout.splitlines()[-1])
    assert 0.5 * tokens / 70 < window <= 1.1 * tokens / 60
    read = {request.path for request in gcs.requests if request.method == "GET"}
    assert any(path.startswith("/bucket/caches") and "train.tfrecord" in path for path in read)
