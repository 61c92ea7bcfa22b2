"""Clusters of Spark and Ray on the loopback addresses of this machine."""

import contextlib
import importlib.util
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tasks import annexes
from tasks.terminal.command_line import UserError

_START_SECONDS = 120


def _engine(name: str, package: str, program: str | None = None) -> Any:
    missing = importlib.util.find_spec(package) is None
    marks = [
        pytest.mark.skipif(name not in annexes.entries("engines"), reason=f"without {name}"),
        pytest.mark.skipif(missing, reason=f"needs the extra {name}: make test-engines"),
        pytest.mark.skipif(bool(program and not shutil.which(program)), reason=f"needs {program}"),
    ]
    return pytest.param(name, marks=marks)


# Parameters of tests: names of this module's functions.
ENGINES = [_engine("spark", "pyspark", "java"), _engine("ray", "ray")]


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a port where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


def refused(build: Any, folder: pathlib.Path, *flags: str) -> str:
    """Returns why a build is refused, which leaves no file."""
    with pytest.raises(UserError) as error:
        build(folder, *flags)
    assert not list(folder.iterdir())
    return str(error.value)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


class SparkCluster:
    """The processes of a cluster of Spark."""

    def __init__(self, folder: pathlib.Path, flags: tuple[str, ...], **environment: str):
        self.folder, self.flags, self.environment = folder, flags, environment
        self.workers: list[subprocess.Popen] = []
        self._all: list[subprocess.Popen] = []

    def start(self, name: str, *command: str, worker: bool = False) -> None:
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(
                command,
                env=os.environ | self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )
        self._all.append(process)
        if worker:
            self.workers.append(process)

    def wait_for(self, name: str, text: str, count: int = 1) -> None:
        """Waits until the log of a process has a text `count` times."""
        path, end = self.folder / f"{name}.log", time.monotonic() + _START_SECONDS
        while path.read_text().count(text) < count:
            assert time.monotonic() < end, path.read_text()[-2000:]
            time.sleep(0.2)

    def kill_worker(self) -> None:
        """Kills a worker with all its processes."""
        _end(self.workers[0])

    def end(self) -> None:
        for process in self._all:
            _end(process)


def _end(process: subprocess.Popen) -> None:
    """Kills all processes below a process that has a session of its own, and waits."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True
    ).stdout.splitlines()
    children: dict[int, list[int]] = {}
    for line in listed:
        pid, parent = map(int, line.split())
        children.setdefault(parent, []).append(pid)
    found = [process.pid]
    for pid in found:
        found += children.get(pid, [])
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def spark(folder: pathlib.Path, workers: int = 2) -> Iterator["SparkCluster"]:
    """Yields a standalone cluster: a master and workers of one core each."""
    import pyspark

    home = pathlib.Path(pyspark.__file__).parent
    port = _free_port()
    master = f"spark://127.0.0.1:{port}"
    flags = "--runner=spark", f"--master={master}", "--conf=spark.ui.enabled=false"
    cluster = SparkCluster(folder, flags, SPARK_LOCAL_IP="127.0.0.1", SPARK_HOME=str(home))
    run = str(home / "bin" / "spark-class"), "org.apache.spark.deploy."
    ports = "--port", str(port), "--webui-port", str(_free_port())
    cluster.start("master", run[0], f"{run[1]}master.Master", "--host", "127.0.0.1", *ports)
    try:
        cluster.wait_for("master", "New state: ALIVE")
        for number in range(workers):
            own = "-c", "1", "-m", "1g", "-d", str(folder / f"work-{number}")
            page = "--webui-port", str(_free_port())
            named = f"worker-{number}", run[0], f"{run[1]}worker.Worker"
            cluster.start(*named, *own, *page, master, worker=True)
        cluster.wait_for("master", "Registering worker", workers)
        yield cluster
    finally:
        cluster.end()


@contextlib.contextmanager
def ray(folder: pathlib.Path, nodes: int = 2) -> Iterator["RayCluster"]:
    """Yields a cluster: a head without processors, and nodes with one each."""
    how = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with mock.patch.dict(os.environ, how):
        from ray.cluster_utils import Cluster

        memory = {"object_store_memory": 80_000_000}
        head = {"num_cpus": 0, "include_dashboard": False, **memory}
        started = Cluster(initialize_head=True, head_node_args=head)
        try:
            found = [started.add_node(wait=False, num_cpus=1, **memory) for _ in range(nodes)]
            started.wait_for_nodes()
            yield RayCluster(started, found, how)
        finally:
            started.shutdown()


class RayCluster:
    """A cluster of Ray."""

    def __init__(self, started: Any, nodes: list[Any], environment: dict[str, str]):
        self._started, self._nodes, self.environment = started, nodes, environment
        self.flags = ("--runner=ray", f"--address={started.address}")

    def kill_worker(self) -> None:
        """Kills a node with all its processes."""
        self._started.remove_node(self._nodes[0], allow_graceful=False)
