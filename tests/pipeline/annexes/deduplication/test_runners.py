"""palimpsest dedup on other runners: the same list by a job service, by pools and on Dataflow."""

import itertools
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from pipeline.annexes.deduplication import dedup
from tests.faults.pools import Cluster
from tests.support.processes import launched, wait_for
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


def test_a_job_service_in_the_process(corpus, wanted, tmp_path):
    given = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"]
    process = started(f"--corpus={corpus}", f"--output={tmp_path}", *given)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (tmp_path / LISTS).read_bytes() == wanted


@pytest.mark.slow
def test_a_pool_loses_its_worker_and_the_same_command_resumes(corpus, wanted, tmp_path):
    out = tmp_path / "out"
    flags = (f"--corpus={corpus}", f"--output={out}")
    with Cluster(2, tmp_path) as cluster:
        process = started(*flags, *cluster.flags)
        assert wait_for(lambda: any(out.glob("signatures-*")), process)
        os.kill(cluster.workers()[0], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        assert "a worker is lost" in err
        assert not (out / LISTS).exists()
        again = started(*flags, *cluster.flags)
        said, err = again.communicate(timeout=300)
        assert again.returncode == 0, err
        assert "kept" in said
    assert (out / LISTS).read_bytes() == wanted


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
    from pipeline.excluding.lists import ExcludeList

    (folder / "list.arrow").write_bytes(data)
    return [{**row, "similarity": str(row["similarity"])} for row in
            ExcludeList(str(folder / "list.arrow"))]  # fmt: skip
