"""Gives builds to pools of workers: Beam's job service, made for many pools and for lost workers.

    python -m pipeline.worker_pool --port=50001      # on every machine
    python -m pipeline.job_service --port=8099       # on one
    python -m pipeline.build … --runner=PortableRunner --job_endpoint=HOST:8099 \\
        --environment_type=EXTERNAL --environment_config=HOST1:50001,HOST2:50001

Workers are spread over the pools. A job ends with an error when one of them is lost: finished
shards are kept, and the same command goes on. Beam's own service knows one pool and waits for a
lost worker for ever. It asks nobody who they are: let it listen in networks that you trust alone.
"""

import itertools
import logging
import signal
import sys
import threading
import time
from typing import Any

from pipeline.build import positive
from pipeline.portable import LOST
from tasks.command_line import Parser, RawHelp, run

# How long a worker may take to come after its pool said that it started.
_START_SECONDS = 300


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(
        prog="python -m pipeline.job_service", description=__doc__, formatter_class=RawHelp
    )
    parser.add_argument("--port", type=positive, default=8099, help="where to listen (8099)")
    return parser


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

    usual = worker_handlers.ControlConnection._read

    def read(self: Any) -> None:
        try:
            usual(self)
        except Exception as error:  # grpc's, without a text, when the process is gone
            logging.getLogger(__name__).info("a worker's connection ended: %r", error)
        finally:
            # All that wait for an answer of it; none do when it was told to go.
            self.abort(RuntimeError(f"{LOST}its process died or its machine is gone"))

    setattr(worker_handlers.ControlConnection, "_read", read)  # noqa: B010
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
            threading.Thread(target=self._expect, args=(url,), daemon=True).start()

        def _expect(self, url: str) -> None:
            """Ends the job when the worker does not come."""
            end = time.monotonic() + _START_SECONDS
            started = worker_handlers.BeamFnControlServicer.UNSTARTED_STATE
            while self.control_conn._state == started:
                if time.monotonic() > end:
                    reason = f"{url} started it and it did not come in {_START_SECONDS} s"
                    self.control_conn.abort(RuntimeError(f"{LOST}{reason}"))
                    return
                time.sleep(1)

    worker_handlers.WorkerHandler.register_environment(
        common_urns.environments.EXTERNAL.urn, beam_runner_api_pb2.ExternalPayload
    )(Pools)


def _service() -> Any:
    """Returns Beam's service, whose jobs take as many workers as they are told."""
    from apache_beam.options.pipeline_options import DirectOptions
    from apache_beam.portability.api import beam_job_api_pb2
    from apache_beam.runners.portability import local_job_service
    from apache_beam.runners.portability.fn_api_runner import fn_runner

    class Job(local_job_service.BeamJob):
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
