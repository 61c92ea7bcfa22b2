"""Beam's local job service, extended to use several worker pools and to notice lost workers."""

import contextlib
import itertools
import logging
import threading
import time
from typing import Any

import grpc
from apache_beam.options.pipeline_options import DirectOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import (
    beam_fn_api_pb2,
    beam_fn_api_pb2_grpc,
    beam_job_api_pb2,
    beam_runner_api_pb2,
    endpoints_pb2,
)
from apache_beam.runners.portability import local_job_service
from apache_beam.runners.portability.fn_api_runner import fn_runner, worker_handlers

from pipeline.runners.portable import LOST

# Maximum time between a pool's answer that a worker started and the worker's connection.
_START_SECONDS = 300
_STOP_SECONDS = 30

# Connections to each job's workers, by the thread that runs the job.
_connections: dict[threading.Thread, list["_Connection"]] = {}
# Number of workers started so far; the pools take turns.
_started = itertools.count()


class _Connection(worker_handlers.ControlConnection):
    """Control connection that ends its job when the worker is lost, instead of waiting forever."""

    _error: Exception | None = None

    def _read(self) -> None:
        try:
            super()._read()
        except Exception as error:  # grpc's error for a lost process has no text
            logging.getLogger(__name__).info("a worker's connection ended: %r", error)
        finally:
            # The job fails without this worker, so the others need not finish.
            jobs = [each for each in list(_connections.values()) if self in each]
            for connections in jobs or [[self]]:
                _end(connections, RuntimeError(f"{LOST}its process died or its machine is gone"))

    def push(self, request: Any) -> Any:
        future = super().push(request)
        if future is not None and self._error:
            future.abort(self._error)
        return future

    def end(self, error: Exception) -> None:
        self._error = error
        for future in list(self._futures_by_id.values()):
            future.abort(error)


def _end(connections: list[_Connection], error: Exception) -> None:
    for connection in connections:
        connection.end(error)


class _PoolWorker(worker_handlers.ExternalWorkerHandler):
    """A worker in one of several pools with comma-separated addresses."""

    control_conn: _Connection
    # This machine's address for workers; None for its own name.
    host: str | None = None

    def host_from_worker(self) -> str:
        return self.host or super().host_from_worker()

    def start_worker(self) -> None:
        urls = self._external_payload.endpoint.url.split(",")
        first, reasons = next(_started), []
        for number in range(len(urls)):
            url = urls[(first + number) % len(urls)]
            try:
                self._start_in(url)
            except grpc.RpcError as error:
                reasons.append(f"{url} ({error.details().rpartition(': ')[2]})")
            else:
                connections = _connections.setdefault(threading.current_thread(), [])
                connections.append(self.control_conn)
                return
        raise RuntimeError(f"{LOST}no pool answers at {', '.join(reasons)}")

    def _start_in(self, url: str) -> None:
        control = endpoints_pb2.ApiServiceDescriptor(url=self.control_address)
        stub = beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolStub(grpc.insecure_channel(url))
        request = beam_fn_api_pb2.StartWorkerRequest(
            worker_id=self.worker_id,
            control_endpoint=control,
            artifact_endpoint=control,
            provision_endpoint=control,
            logging_endpoint=self.logging_api_service_descriptor(),
        )
        if problem := stub.StartWorker(request, timeout=_START_SECONDS).error:
            raise RuntimeError(f"{LOST}{url} could not start it: {problem}")
        self._stub = stub
        threading.Thread(target=self._expect, args=(url,), daemon=True).start()

    def stop_worker(self) -> None:
        """Makes the pool end the process, which may still be working after its job failed."""
        request = beam_fn_api_pb2.StopWorkerRequest(worker_id=self.worker_id)
        # The worker may not have started, or its pool may be gone.
        with contextlib.suppress(grpc.RpcError, AttributeError):
            self._stub.StopWorker(request, timeout=_STOP_SECONDS)

    def _expect(self, url: str) -> None:
        """Ends the job if the worker does not connect in time."""
        end = time.monotonic() + _START_SECONDS
        unstarted = worker_handlers.BeamFnControlServicer.UNSTARTED_STATE
        while self.control_conn._state == unstarted:
            if time.monotonic() > end:
                reason = f"{url} started it, but it did not connect within {_START_SECONDS} s"
                self.control_conn.end(RuntimeError(f"{LOST}{reason}"))
                return
            time.sleep(1)


class _Job(local_job_service.BeamJob):
    """A job with --direct_num_workers workers that ends when cancelled."""

    def _run_job(self) -> None:
        try:
            super()._run_job()
        finally:
            _connections.pop(threading.current_thread(), None)

    def cancel(self) -> None:
        super().cancel()
        _end(_connections.get(self._run_thread, []), RuntimeError("the job was cancelled"))

    def _invoke_runner(self) -> Any:
        self.set_state(beam_job_api_pb2.JobState.RUNNING)
        options = self.pipeline_options()
        runner = fn_runner.FnApiRunner(provision_info=self._provision_info)
        runner._num_workers = int(options.view_as(DirectOptions).direct_num_workers)
        return runner.run_via_runner_api(self._pipeline_proto, options)


class _Service(local_job_service.LocalJobServicer):
    """The job service at an address of this machine, also given to builds for staging."""

    def __init__(self, host: str):
        super().__init__(beam_job_type=_Job)
        self._host = host

    def get_service_address(self) -> str:
        return self._host


def create(host: str) -> local_job_service.LocalJobServicer:
    """Installs the classes above in this process's Beam; returns the job service at `host`."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    _PoolWorker.host = None if host == "localhost" else host
    setattr(worker_handlers, "ControlConnection", _Connection)  # noqa: B010
    worker_handlers.WorkerHandler.register_environment(
        common_urns.environments.EXTERNAL.urn, beam_runner_api_pb2.ExternalPayload
    )(_PoolWorker)
    return _Service(host)
