"""Starts workers of builds on this machine when a job service asks: see pipeline.job_service.

    python -m pipeline.worker_pool --port=50001

A worker is a process of this very Python, with this one's packages and environment (HF_TOKEN,
credentials). Whoever reaches the port can start one: open it to networks that you trust alone.
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
    parser.add_argument("--port", type=positive, default=50001, help="where to listen (50001)")
    return parser


def main(argv: list[str]) -> None:
    """The command; runs until it is ended by SIGTERM or SIGINT."""
    port = command_line().parse_args(argv).port
    # Beam starts whatever `python` PATH has, which without our packages would never answer.
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    from apache_beam.runners.worker import worker_pool_main

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    pool = worker_pool_main.BeamFnExternalWorkerPoolServicer
    _, server = pool.start(use_process=True, port=port)
    print(f"workers start when asked at port {port}", flush=True)
    signal.pause()
    server.stop(0)


if __name__ == "__main__":
    run(main)
