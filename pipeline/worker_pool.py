"""Starts workers on this machine for builds given to pipeline.job_service.

    python -m pipeline.worker_pool --port=50001

A worker is a process of the same Python, packages and environment variables (HF_TOKEN,
credentials). There is no authentication: anyone who can reach the port can start workers, so bind
it to trusted networks only.
"""

import os
import signal
import sys

from tasks.terminal.command_line import Parser, RawHelp, positive, run


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(
        prog="python -m pipeline.worker_pool", description=__doc__, formatter_class=RawHelp
    )
    parser.add_argument("--port", type=positive, default=50001, help="port to listen on")
    return parser


def main(argv: list[str]) -> None:
    """Runs the pool until SIGTERM or SIGINT."""
    port = command_line().parse_args(argv).port
    # Beam starts the first `python` in PATH, which must be this one to have our packages.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    from apache_beam.runners.worker import worker_pool_main

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pool = worker_pool_main.BeamFnExternalWorkerPoolServicer
    _, server = pool.start(use_process=True, port=port)
    print(f"starting workers on request at port {port}", flush=True)
    signal.pause()
    server.stop(0)


if __name__ == "__main__":
    run(main)
