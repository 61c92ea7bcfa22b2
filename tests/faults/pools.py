"""A job service and pools of workers on this machine, of which processes are killed.

While rows are being written, a worker, a pool with its worker, or the job service is killed. The
build must then end by itself, and the same command must resume once the killed process was
restarted.
"""

import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from pipeline.job_service import LOCALHOST
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError
from tests.faults.builds import KILLS_PER_TRIAL, Fault, Trial
from tests.faults.command import Command

_START_SECONDS = 120
# The longest time between the first row and a kill.
_MAX_DELAY_SECONDS = 4.0
# Shares of the kills that hit a pool, or the job service; the rest hit workers.
_POOL_SHARE, _SERVICE_SHARE = 0.15, 0.1


class Cluster:
    """A job service and `pools` pools of workers, which run until the `with` block ends."""

    def __init__(self, pools: int, folder: pathlib.Path, host: str = LOCALHOST):
        ports = _free_ports(pools + 1)
        modules = [("pipeline.job_service", f"--host={host}", f"--port={ports[0]}")]
        modules += [("pipeline.worker_pool", f"--port={port}") for port in ports[1:]]
        self._ports = ports
        self._hosts = [host, *[LOCALHOST] * pools]
        self._commands = [
            Command(f"python -m {' '.join(module)}", module, folder / f"{module[0]}-{port}.log")
            for module, port in zip(modules, ports, strict=True)
        ]
        self._service, *self._pools = self._commands
        addresses = ",".join(f"localhost:{port}" for port in ports[1:])
        self.flags = (
            "--runner=PortableRunner",
            f"--job_endpoint={host}:{ports[0]}",
            "--environment_type=EXTERNAL",
            f"--environment_config={addresses}",
        )

    def __enter__(self) -> "Cluster":
        self.repair()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._commands:
            each.kill()

    def repair(self) -> None:
        """Starts every process that is not running, and waits until all of them answer."""
        for each in self._commands:
            if not each.running:
                each.start()
        end = time.monotonic() + _START_SECONDS
        for each, host, port in zip(self._commands, self._hosts, self._ports, strict=True):
            while not _answers(host, port):
                if not each.running or time.monotonic() > end:
                    raise UserError(f"{each.name} does not start: {each.tail(300)}")
                time.sleep(0.2)

    def workers(self) -> list[int]:
        parents = {str(each.pid) for each in self._pools}
        listed = subprocess.run(
            ["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True
        ).stdout.splitlines()
        rows = [line.split() for line in listed]
        return [int(pid) for pid, parent, state in rows if parent in parents and state[0] != "Z"]

    def faults(self, kills: int) -> list[Fault]:
        pools, services = (max(1, round(kills * share)) for share in (_POOL_SHARE, _SERVICE_SHARE))
        workers = max(kills - pools - services, 1)

        def fault(victim: str, injections: int, kill: Callable[[Trial], bool]) -> Fault:
            name = f"SIGKILL of a {victim}"
            return Fault(name, injections, lambda trial: self._break(trial, kill), KILLS_PER_TRIAL)

        return [
            fault("worker", workers, self._kill_worker),
            fault("pool", pools, lambda trial: trial.random.choice(self._pools).kill()),
            fault("job service", services, lambda _: self._service.kill()),
        ]

    def _kill_worker(self, trial: Trial) -> bool:
        """Kills a worker; returns False if there is none."""
        workers = self.workers()
        if workers:
            os.kill(trial.random.choice(workers), signal.SIGKILL)
        return bool(workers)

    def _break(self, trial: Trial, kill: Callable[[Trial], bool]) -> None:
        def strike(trial: Trial) -> bool:
            time.sleep(trial.random.uniform(0, _MAX_DELAY_SECONDS))
            if trial.command.running and kill(trial):
                trial.count_injection()
            if trial.finish() not in (0, EXIT_USER_ERROR):
                raise UserError(f"the build ended by itself: {trial.command.tail()}")
            return trial.command.exit_code != 0

        trial.before_start = self.repair
        trial.break_and_audit(Trial.reach_rows, strike)


def _answers(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("localhost", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
