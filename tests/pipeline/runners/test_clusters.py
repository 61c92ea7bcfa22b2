"""Builds on clusters of Spark and Ray on this machine; run by `make test-engines`."""

import gzip
import sys

import pytest

from tasks.storage import files
from tests.pipeline.runners.test_job_parts import PIECES, TASK
from tests.pipeline.runners.test_job_parts import wanted as wanted
from tests.support import clusters
from tests.support.processes import launched, wait_for

pytestmark = pytest.mark.engines


@pytest.fixture
def cluster(request, tmp_path):
    with getattr(clusters, request.param)(tmp_path) as started:
        yield started


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("cluster", clusters.ENGINES, indirect=True)
def test_a_worker_is_killed_while_rows_are_written(start, cluster, wanted, checksums, tmp_path):
    folder = tmp_path / "cache" / TASK
    # Spark also begins slow tasks twice.
    more = ["--conf=spark.speculation=true"] if cluster.flags[0].endswith("spark") else []
    more += ["--conf=spark.speculation.quantile=0.1"] if more else []
    process = start(tmp_path / "cache", PIECES, *cluster.flags, *more, **cluster.environment)
    assert wait_for(lambda: any(folder.glob(files.PARTIAL + "*.tfrecord-*")), process)
    cluster.kill_worker()
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert "tokenized 2,004 texts" in out  # every document counted once
    assert checksums(folder) == wanted


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("cluster", clusters.ENGINES, indirect=True)
def test_a_mistake_in_a_worker(cluster, vocabulary, tmp_path):
    # Only a worker reads so far.
    data = gzip.compress(b'{"text": "good"}\n' * 200_000)
    (tmp_path / "cut.jsonl.gz").write_bytes(data[: len(data) // 2])
    command = [
        *(sys.executable, "-m", "pipeline.build", PIECES, f"--task={TASK}", "--extra_ids=100"),
        *(f"--vocabulary={vocabulary}", f"--corpus=json:{tmp_path}/cut.jsonl.gz"),
        *(f"--cache_dir={tmp_path}/cache", *cluster.flags),
    ]
    process = launched(command, **cluster.environment)
    _, err = process.communicate(timeout=500)
    assert process.returncode == 2, err
    (line,) = [line for line in err.splitlines() if not line.startswith("building ")]
    assert f"{tmp_path}/cut.jsonl.gz" in line
