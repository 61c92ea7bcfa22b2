"""palimpsest dedup on other runners: the same list by Spark, by Ray and on Dataflow."""

import itertools
import pathlib
import subprocess
import sys

import pytest

from pipeline.annexes.deduplication import dedup
from tasks import annexes
from tests.support import clusters
from tests.support.processes import launched
from tests.support.servers import dataflow_worker
from tests.support.servers.dataflow import DataflowServer
from tests.support.servers.gcs import GcsServer

pytestmark = pytest.mark.processes
# Several pieces, so that workers share them.
PIECES = "--shard_bytes=100000"
LISTS = "exclude.arrow"


@pytest.fixture(scope="module")
def wanted(corpus, tmp_path_factory) -> bytes:
    folder = tmp_path_factory.mktemp("wanted")
    dedup.main([f"--corpus={corpus}", f"--output={folder}", PIECES])
    return (folder / LISTS).read_bytes()


def started(*flags: str, **environment: str) -> subprocess.Popen:
    return launched(
        [sys.executable, "-m", "pipeline.annexes.deduplication.dedup", PIECES, *flags],
        **environment,
    )


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.parametrize("name", clusters.ENGINES)
def test_clusters(corpus, wanted, tmp_path, name):
    with getattr(clusters, name)(tmp_path) as cluster:
        given = (f"--corpus={corpus}", f"--output={tmp_path / 'out'}", *cluster.flags)
        process = started(*given, **cluster.environment)
        _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert (tmp_path / "out" / LISTS).read_bytes() == wanted


@pytest.mark.skipif("DataflowRunner" not in annexes.entries("engines"), reason="without it")
@pytest.mark.slow
def test_dataflow(corpus, wanted, tmp_path):
    """Both jobs run from the staged files alone, in empty environments."""
    numbers = itertools.count()
    data = pathlib.Path(corpus.partition(":")[2].partition("?")[0]).read_bytes()

    def work(job):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return dataflow_worker.work(job, gcs, folder)

    with GcsServer() as gcs, DataflowServer(work) as server:
        gcs.store.put("bucket", "corpus/documents.jsonl", data, {}, {})
        process = started(
            "--corpus=json:gs://bucket/corpus/documents.jsonl?validation=0.1",
            *("--output=gs://bucket/list", "--runner=DataflowRunner", "--project=our-project"),
            *("--region=europe-west4", "--temp_location=gs://bucket/temp"),
            *(f"--dataflow_endpoint={server.url}", "--no_auth"),
            **gcs.environment(),
        )
        _, err = process.communicate(timeout=900)
        assert process.returncode == 0, (err, [job.messages for job in server.jobs])
        found = gcs.read(f"list/{LISTS}")
    assert len(server.jobs) == 2
    # The header has the corpus's SPEC.
    local, there = (entries(each, tmp_path) for each in (wanted, found))
    assert there == local


def entries(data: bytes, folder: pathlib.Path) -> list[dict]:
    from pipeline.exclusion.lists import ExcludeList

    (folder / "list.arrow").write_bytes(data)
    return [{**row, "similarity": str(row["similarity"])} for row in
            ExcludeList(str(folder / "list.arrow"))]  # fmt: skip
