"""Gives builds to pools of workers: Beam's job service, made for many pools and for lost workers.

    python -m pipeline.worker_pool --port=50001      # on every machine
    python -m pipeline.job_service --port=8099       # on one
    python -m pipeline.build … --runner=PortableRunner --job_endpoint=HOST:8099 \\
        --environment_type=EXTERNAL --environment_config=HOST1:50001,HOST2:50001

Workers are spread over the pools. When one of them is lost the job ends with an error: finished
shards are kept, and the same command goes on. Beam's own service knows one pool, waits for a lost
worker for ever, and lets workers go on that nobody waits for. It asks nobody who they are: let it
listen in networks that you trust alone.
"""

import contextlib
import itertools
import logging
import signal
import sys
import threading
import time
from typing import Any

from pipeline.runners.portable import LOST
from tasks.terminal.command_line import Parser, RawHelp, positive, run

# How long a worker may take to come after its pool said that it started.
_START_SECONDS = 300
_STOP_SECONDS = 30
# The connections to the workers of each job, by the thread that runs it.
_connections: dict[threading.Thread, list[Any]] = {}


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(
        prog="python -m pipeline.job_service", description=__doc__, formatter_class=RawHelp
    )
    parser.add_argument("--port", type=positive, default=8099, help="where to listen (8099)")
    return parser


def _end(connections: list[Any], error: Exception) -> None:
    """Has all that waits for an answer of these workers, now or later, fail with `error`."""
    for connection in connections:
        connection.ended = error
        for future in list(connection._futures_by_id.values()):
            future.abort(error)


def _install() -> None:
    """Teaches Beam's service about several pools, and about workers that are lost."""
    import grpc
    from apache_beam.portability import common_urns
    from apache_beam.portability.api import (
        beam_fn_api_pb2,
        beam_fn_api_pb2_grpc,
        beam_runner_api_pb2,
        endpoints_pb2,
    )
    from apache_beam.runners.portability.fn_api_runner import worker_handlers

    connection = worker_handlers.ControlConnection
    usual_read, usual_push = connection._read, connection.push

    def read(self: Any) -> None:
        try:
            usual_read(self)
        except Exception as error:  # grpc's, without a text, when the process is gone
            logging.getLogger(__name__).info("a worker's connection ended: %r", error)
        finally:
            # The others may have hours of work left; without this one it is in vain.
            for job in [each for each in list(_connections.values()) if self in each] or [[self]]:
                _end(job, RuntimeError(f"{LOST}its process died or its machine is gone"))

    def push(self: Any, request: Any) -> Any:
        future = usual_push(self, request)
        if future is not None and hasattr(self, "ended"):  # nobody will answer
            future.abort(self.ended)
        return future

    setattr(connection, "_read", read)  # noqa: B010
    setattr(connection, "push", push)  # noqa: B010
    turns = itertools.count()

    class Pools(worker_handlers.ExternalWorkerHandler):
        """A worker of one of several pools, whose addresses are set apart by commas."""

        def start_worker(self) -> None:
            urls = self._external_payload.endpoint.url.split(",")
            first, reasons = next(turns), []
            for number in range(len(urls)):
                url = urls[(first + number) % len(urls)]
                try:
                    self._start_in(url)
                    jobs_own = _connections.setdefault(threading.current_thread(), [])
                    jobs_own.append(self.control_conn)
                    return
                except grpc.RpcError as error:
                    reasons.append(f"{url} ({error.details().rpartition(': ')[2]})")
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
            """Has the pool end the process: when a job has failed, it may be at work still."""
            request = beam_fn_api_pb2.StopWorkerRequest(worker_id=self.worker_id)
            with contextlib.suppress(grpc.RpcError, AttributeError):  # never started, or all gone
                self._stub.StopWorker(request, timeout=_STOP_SECONDS)

        def _expect(self, url: str) -> None:
            """Ends the job when the worker does not come."""
            end = time.monotonic() + _START_SECONDS
            started = worker_handlers.BeamFnControlServicer.UNSTARTED_STATE
            while self.control_conn._state == started:
                if time.monotonic() > end:
                    reason = f"{url} started it and it did not come in {_START_SECONDS} s"
                    _end([self.control_conn], RuntimeError(f"{LOST}{reason}"))
                    return
                time.sleep(1)

    worker_handlers.WorkerHandler.register_environment(
        common_urns.environments.EXTERNAL.urn, beam_runner_api_pb2.ExternalPayload
    )(Pools)


def _service() -> Any:
    """Returns Beam's service, whose jobs take as many workers as they are told, and end when they
    are cancelled."""
    from apache_beam.options.pipeline_options import DirectOptions
    from apache_beam.portability.api import beam_job_api_pb2
    from apache_beam.runners.portability import local_job_service
    from apache_beam.runners.portability.fn_api_runner import fn_runner

    class Job(local_job_service.BeamJob):
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

    return local_job_service.LocalJobServicer(beam_job_type=Job)


def main(argv: list[str]) -> None:
    """The command; runs until it is ended by SIGTERM or SIGINT."""
    port = command_line().parse_args(argv).port
    logging.basicConfig(level=logging.INFO)
    _install()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    service = _service()
    service.start_grpc_server(port)
    print(f"jobs are taken at port {port}", flush=True)
    try:
        signal.pause()
    finally:
        service.stop()


if __name__ == "__main__":
    run(main)
