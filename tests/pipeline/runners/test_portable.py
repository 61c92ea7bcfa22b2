"""Builds by Beam's portable runner, with workers that die."""

import os
import re
import signal
import socket

import pytest

from pipeline import job_service, worker_pool
from pipeline.runners import portable
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tests.faults import __main__ as faults
from tests.faults.pools import Cluster
from tests.support.processes import wait_for

pytestmark = pytest.mark.processes

TASK = "python_docs_span_corruption"


@pytest.fixture(autouse=True)
def usual_sigint():
    """Restores the handler of SIGINT, which Beam's embedded job server replaces."""
    usual = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, usual)


def test_a_job_service_in_this_process(build, cache, checksums, tmp_path, capsys):
    flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"]
    assert checksums(build(tmp_path, *flags)) == checksums(cache)
    assert "tokenized 2,004 texts" in capsys.readouterr().out  # the counters were returned


def test_faulty_documents_end_a_build_there_too(build, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": ["no text"]}\nno JSON\n' * 90)
    flags = ["--runner=PortableRunner", "--job_endpoint=embed", "--environment_type=LOOPBACK"]
    corpus = f"--corpus=json:{tmp_path}/bad.jsonl?validation=0"
    with pytest.raises(UserError, match="of the documents are faulty"):
        build(tmp_path / "cache", corpus, *flags)


def test_no_job_service(build, tmp_path):
    with pytest.raises(UserError, match="needs --job_endpoint=HOST:PORT"):
        build(tmp_path, "--runner=PortableRunner")
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        endpoint = f"--job_endpoint=localhost:{unused.getsockname()[1]}"
        with pytest.raises(UserError, match="no job service answers at --job_endpoint=localhost"):
            build(tmp_path, "--runner=PortableRunner", endpoint)
    with pytest.raises(UserError, match="no job service answers at --job_endpoint=here"):
        build(tmp_path, "--runner=FlinkRunner", "--job_endpoint=here")
    assert not list(tmp_path.iterdir())


def test_a_worker_for_every_pool():
    given = ["--runner=PortableRunner", "--environment_type=EXTERNAL"]
    with portable.prepared([*given, "--environment_config=a:1,b:2,c:3"], "") as arguments:
        assert "--direct_num_workers=3" in arguments
    with portable.prepared([*given, "--environment_config=a:1"], "") as arguments:
        assert not [each for each in arguments if "workers" in each]


def test_ports():
    assert (job_service.Flags().port, job_service.Flags().host) == (8099, "localhost")
    assert worker_pool.Flags().port == 50001


@pytest.fixture
def address():
    """The address of this machine in a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        try:
            client.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine is in no network")
        found = client.getsockname()[0]
    if found.startswith("127."):
        pytest.skip("this machine is in no network")
    return found


def test_a_job_service_at_an_address_of_the_network(build, cache, checksums, tmp_path, address):
    with Cluster(1, tmp_path, host=address) as cluster:
        (endpoint,) = [flag for flag in cluster.flags if flag.startswith("--job_endpoint=")]
        host, _, port = endpoint.partition("=")[2].rpartition(":")
        assert host == address
        with socket.socket() as client:
            assert client.connect_ex(("localhost", int(port))) != 0
        assert checksums(build(tmp_path / "cache", *cluster.flags)) == checksums(cache)
        log = (tmp_path / f"pipeline.job_service-{port}.log").read_text()
        assert f"accepting jobs on {address}:{port}" in log


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("0.0.0.0", "--host=0.0.0.0 is not an address that builds and workers can connect to"),
        ("203.0.113.7", "cannot listen on 203.0.113.7:8099: --host must be this machine's"),
    ],
)
def test_a_host_that_is_not_this_machine(host, says):
    with pytest.raises(UserError, match=re.escape(says)):
        job_service.main([f"--host={host}"])


@pytest.mark.slow
def test_a_worker_dies_and_the_same_command_resumes(start, cache, checksums, tmp_path):
    folder = tmp_path / "cache" / TASK
    with Cluster(3, tmp_path) as cluster:
        process = start(tmp_path / "cache", *cluster.flags)
        assert wait_for(lambda: any(folder.glob(files.PARTIAL + "*.tfrecord-*")), process)
        workers = cluster.workers()
        assert len(workers) == 3
        os.kill(workers[0], signal.SIGKILL)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2
        (line,) = [line for line in err.splitlines() if not line.startswith("building ")]
        assert (
            "a worker is lost: its process died or its machine is gone; finished shards are kept"
            in line
        )
        assert not (folder / "COMPLETED").exists()
        assert not cluster.workers()  # the other workers were stopped

        second = start(tmp_path / "cache", *cluster.flags)
        assert wait_for(cluster.workers, second)
        second.send_signal(signal.SIGINT)
        _, err = second.communicate(timeout=60)
        assert second.returncode == 130, err
        assert "interrupted; run the same command to resume" in err
        wait_for(lambda: not cluster.workers(), seconds=60)

        again = start(tmp_path / "cache", *cluster.flags)
        out, err = again.communicate(timeout=300)
        assert again.returncode == 0, err
        assert "tokenized" in out
    assert checksums(folder) == checksums(cache)


@pytest.mark.slow
def test_pools_and_the_job_service_die_too(corpus, vocabulary, capsys):
    given = [f"--vocabulary={vocabulary}", "--extra_ids=100", f"--corpus={corpus}"]
    code = faults.main(["builds", *given, "--pools=3", "--kills=5"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert re.search(r"SIGKILL of a worker +\| +3 \|", out)
    assert "by a worker in each of 3 pools" in out
