"""Starts workers here for pipeline.job_service.

    python -m pipeline.worker_pool --port=50001

A worker is a process with the same Python, packages and environment variables (HF_TOKEN,
credentials). There is no authentication: anyone who can reach the port can start workers, so bind
it to trusted networks only.
"""

import dataclasses
import os
import signal
import sys

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import at_least, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    port: int = field(50001, "port to listen on", rule=at_least(1))


def run(flags: Flags) -> None:
    """Runs the pool until SIGTERM or SIGINT."""
    # Beam starts the first `python` in PATH; it must be this one, which has our packages.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    from apache_beam.runners.worker import worker_pool_main

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pool = worker_pool_main.BeamFnExternalWorkerPoolServicer
    try:
        _, server = pool.start(use_process=True, port=flags.port)
    except RuntimeError as error:  # grpc's error, whose reason is in its log
        raise UserError(
            f"cannot listen on --port={flags.port}: another program may use it"
        ) from error
    print(f"starting workers on request at port {flags.port}", flush=True)
    signal.pause()
    server.stop(0)


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
