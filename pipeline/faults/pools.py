"""Kills what builds of Beam's portable runner stand on: `python -m pipeline.chaos --pools=3`.

A job service and pools of workers run as processes of their own on this machine. While rows are
written, a worker, a pool with its worker, or the job service is killed; the build must then end by
itself, and the same command must go on once what died was started again.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline.chaos import KILLS_A_HISTORY, Fault, History
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError

_START_SECONDS = 120
# A worker is killed so long after rows were first seen to be written, at most.
_LONGEST_PEACE_SECONDS = 4.0
_OF_POOLS, _OF_SERVICE = 0.15, 0.1


class Cluster:
    """A job service and `pools` pools of workers, until the `with` block ends.

    Attributes:
      flags: what sends a build there.
    """

    def __init__(self, pools: int, folder: pathlib.Path):
        ports = _free_ports(pools + 1)
        self._service = f"pipeline.job_service --port={ports[0]}"
        self._pools = [f"pipeline.worker_pool --port={port}" for port in ports[1:]]
        self._folder = folder
        self._running: dict[str, subprocess.Popen] = {}
        addresses = ",".join(f"localhost:{port}" for port in ports[1:])
        self.flags = (
            "--runner=PortableRunner",
            f"--job_endpoint=localhost:{ports[0]}",
            "--environment_type=EXTERNAL",
            f"--environment_config={addresses}",
        )

    def __enter__(self) -> "Cluster":
        self.mend()
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._running:
            self._kill(name)

    def mend(self) -> None:
        """Starts what does not run, and waits until all answer.

        Raises:
          UserError: one ended at once, or does not answer.
        """
        for name in (self._service, *self._pools):
            if name not in self._running or self._running[name].poll() is not None:
                with open(self._log(name), "wb") as log:
                    self._running[name] = subprocess.Popen(
                        [sys.executable, "-m", *name.split()],
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
        end = time.monotonic() + _START_SECONDS
        for name, process in self._running.items():
            port = int(name.rpartition("=")[2])
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > end:
                    said = " ".join(self._log(name).read_text(errors="replace").split())[-300:]
                    raise UserError(f"python -m {name} does not start: {said}")
                time.sleep(0.2)

    def _log(self, name: str) -> pathlib.Path:
        return self._folder / f"{name.split()[0]}-{name.rpartition('=')[2]}.log"

    def _kill(self, name: str) -> None:
        """Kills a process and those it started."""
        process = self._running[name]
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def workers(self) -> list[int]:
        """Process ids of the workers."""
        parents = {str(self._running[name].pid) for name in self._pools}
        listed = subprocess.run(
            ["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True
        ).stdout.splitlines()
        rows = [line.split() for line in listed]
        return [int(pid) for pid, parent, state in rows if parent in parents and state[0] != "Z"]

    def faults(self, kills: int) -> list[Fault]:
        """Returns what is to be killed, `kills` times in all."""
        pools, services = (max(1, round(kills * share)) for share in (_OF_POOLS, _OF_SERVICE))

        def of(kill: Callable[[History], bool]) -> Callable[[History], None]:
            return lambda history: self._live(history, kill)

        return [
            Fault("SIGKILL of a worker", max(kills - pools - services, 1), of(self._kill_worker),
                  KILLS_A_HISTORY),
            Fault("SIGKILL of a pool", pools, of(self._kill_pool), KILLS_A_HISTORY),
            Fault("SIGKILL of the job service", services, of(self._kill_service), KILLS_A_HISTORY),
        ]  # fmt: skip

    def _kill_worker(self, history: History) -> bool:
        workers = self.workers()
        if workers:
            os.kill(history.random.choice(workers), signal.SIGKILL)
        return bool(workers)

    def _kill_pool(self, history: History) -> bool:
        self._kill(history.random.choice(self._pools))
        return True

    def _kill_service(self, history: History) -> bool:
        self._kill(self._service)
        return True

    def _live(self, history: History, kill: Callable[[History], bool]) -> None:
        for _ in range(history.strikes):
            self.mend()
            process = history.begin(1)
            if not history.wait_for_rows(process):
                break  # it was faster
            time.sleep(history.random.uniform(0, _LONGEST_PEACE_SECONDS))
            if process.poll() is None and kill(history):
                history.struck()
            code = history.end(process)
            if code not in (0, EXIT_USER_ERROR):
                history.row.failures.append(f"the build ended with {code}: {history.said()}")
        self.mend()
        history.finish()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
