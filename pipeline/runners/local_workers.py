"""Beam worker processes on this machine that end with the job or their parent process.

Beam's own handler waits for workers to end by themselves, forever if one was killed before it
connected.
"""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from apache_beam.portability import python_urns
from apache_beam.portability.api import endpoints_pb2
from apache_beam.runners.portability.fn_api_runner import worker_handlers
from google.protobuf import json_format, text_format

from tasks.terminal.interrupt import shielded

# Time for a worker to end by itself after its job.
_STOP_SECONDS = 5
_CHILD = "from tasks.terminal import child; child.main()"
_WORKER = "apache_beam.runners.worker.sdk_worker_main"


class Workers:
    """The worker processes of a job; `deaths` describes how workers died."""

    def __init__(self, on_death: Callable[[], None]):
        self.deaths: list[str] = []
        self._on_death = on_death
        self._running: list[subprocess.Popen] = []
        self._over = False

    def start(self, environment: dict[str, str]) -> subprocess.Popen:
        command = [sys.executable, "-c", _CHILD, str(os.getpid()), _WORKER]
        with shielded():
            process = subprocess.Popen(command, env=environment)
        self._running.append(process)
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        if self._over:
            process.kill()
        return process

    def _watch(self, process: subprocess.Popen) -> None:
        code = process.wait()
        if code and not self._over:
            self._over = True  # the others are useless without it
            self.deaths.append(f"by signal {-code}" if code < 0 else f"with exit code {code}")
            self._on_death()

    def kill(self) -> None:
        """Kills all workers, without locks, so signal handlers may call it."""
        self._over = True
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    def end(self, process: subprocess.Popen) -> None:
        self._over = True
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def create(on_death: Callable[[], None]) -> Workers:
    """Makes Beam start the next job's workers here; a thread calls `on_death` if one dies."""
    workers = Workers(on_death)

    class Handler(worker_handlers.GrpcWorkerHandler):
        """Beam's handler of one worker."""

        def __init__(self, command: bytes, state: Any, provision_info: Any, grpc_server: Any):
            super().__init__(state, provision_info, grpc_server)

        def start_worker(self) -> None:
            def descriptor(url: str) -> str:
                return text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=url))

            options = self.provision_info.provision_info.pipeline_options
            self._process = workers.start(
                {
                    **os.environ,
                    "WORKER_ID": self.worker_id,
                    "PIPELINE_OPTIONS": json_format.MessageToJson(options),
                    "CONTROL_API_SERVICE_DESCRIPTOR": descriptor(self.control_address),
                    "LOGGING_API_SERVICE_DESCRIPTOR": descriptor(
                        self.logging_api_service_descriptor().url
                    ),
                }
            )

        def stop_worker(self) -> None:
            workers.end(self._process)

    worker_handlers.WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)(Handler)
    return workers
