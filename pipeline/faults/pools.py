"""Faults of builds by Beam's portable runner: `python -m pipeline.chaos --pools=3`.

A job service and pools of workers run as processes on this machine. While rows are being written, a
worker, a pool with its worker, or the job service is killed. The build must then end by itself, and
the same command must resume once the killed process was restarted.
"""

import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from pipeline.faults.harness import Fault, Trial
from pipeline.faults.local import KILLS_PER_TRIAL
from pipeline.faults.process_group import ModuleGroup
from pipeline.job_service import LOCALHOST
from tasks.terminal.command_line import EXIT_USER_ERROR, UserError

_START_SECONDS = 120
# The longest time between the first row and a kill.
_MAX_DELAY_SECONDS = 4.0
# Shares of the kills that hit a pool, or the job service; the rest hit workers.
_POOL_SHARE, _SERVICE_SHARE = 0.15, 0.1


class Cluster:
    """A job service and `pools` pools of workers, which run until the `with` block ends.

    Args:
      pools: number of pools.
      folder: folder for their logs.
      host: address of this machine at which the job service listens.

    Attributes:
      flags: the flags that send a build to this cluster.
    """

    def __init__(self, pools: int, folder: pathlib.Path, host: str = LOCALHOST):
        ports = _free_ports(pools + 1)
        self._host = host
        self._service = f"pipeline.job_service --host={host} --port={ports[0]}"
        self._pools = [f"pipeline.worker_pool --port={port}" for port in ports[1:]]
        self._folder = folder
        self._running: dict[str, ModuleGroup] = {}
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
        for process in self._running.values():
            process.kill()

    def repair(self) -> None:
        """Starts every process that is not running, and waits until all of them answer.

        Raises:
          UserError: a process ended at once, or does not answer.
        """
        for name in (self._service, *self._pools):
            if name not in self._running or not self._running[name].running:
                log = self._folder / f"{name.split()[0]}-{name.rpartition('=')[2]}.log"
                self._running[name] = ModuleGroup(name.split(), log)
        end = time.monotonic() + _START_SECONDS
        for name, process in self._running.items():
            port = int(name.rpartition("=")[2])
            while not _answers(self._host if name == self._service else LOCALHOST, port):
                if not process.running or time.monotonic() > end:
                    raise UserError(f"python -m {name} does not start: {process.log_tail(300)}")
                time.sleep(0.2)

    def workers(self) -> list[int]:
        """Returns the process ids of the workers."""
        parents = {str(self._running[name].pid) for name in self._pools}
        listed = subprocess.run(
            ["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True
        ).stdout.splitlines()
        rows = [line.split() for line in listed]
        return [int(pid) for pid, parent, state in rows if parent in parents and state[0] != "Z"]

    def faults(self, kills: int) -> list[Fault]:
        """Returns faults that make `kills` SIGKILLs in all."""
        pools, services = (max(1, round(kills * share)) for share in (_POOL_SHARE, _SERVICE_SHARE))
        workers = max(kills - pools - services, 1)

        def fault(victim: str, injections: int, kill: Callable[[Trial], bool]) -> Fault:
            return Fault(
                f"SIGKILL of a {victim}",
                injections,
                lambda trial: self._run_trial(trial, kill),
                KILLS_PER_TRIAL,
            )

        return [
            fault("worker", workers, self._kill_worker),
            fault("pool", pools, self._kill_pool),
            fault("job service", services, self._kill_service),
        ]

    def _kill_worker(self, trial: Trial) -> bool:
        """Kills a worker; returns False if there is none."""
        workers = self.workers()
        if workers:
            os.kill(trial.random.choice(workers), signal.SIGKILL)
        return bool(workers)

    def _kill_pool(self, trial: Trial) -> bool:
        self._running[trial.random.choice(self._pools)].kill()
        return True

    def _kill_service(self, trial: Trial) -> bool:
        self._running[self._service].kill()
        return True

    def _run_trial(self, trial: Trial, kill: Callable[[Trial], bool]) -> None:
        for _ in range(trial.injections):
            self.repair()
            build = trial.start(1)
            if not trial.wait_for_rows(build):
                break  # the build finished first
            time.sleep(trial.random.uniform(0, _MAX_DELAY_SECONDS))
            if build.running and kill(trial):
                trial.count_injection()
            code = trial.finish(build)
            if code not in (0, EXIT_USER_ERROR):
                trial.outcome.failures.append(
                    f"the build ended with code {code}: {build.log_tail()}"
                )
        self.repair()
        trial.rebuild_and_audit()


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
