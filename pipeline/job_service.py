"""Runs builds on pools of workers: Beam's job service for several machines.

    python -m pipeline.worker_pool --port=50001      # on every machine
    python -m pipeline.job_service --port=8099       # on one machine
    python -m pipeline.build … --runner=PortableRunner --job_endpoint=HOST:8099 \\
        --environment_type=EXTERNAL --environment_config=HOST1:50001,HOST2:50001

Workers are spread over the pools. If a worker is lost, the job ends with an error; finished shards
are kept, and the same command resumes. (Beam's own service supports one pool, hangs when a worker
is lost and leaves orphaned workers running.) There is no authentication: bind it to trusted
networks only.
"""

import logging
import signal
import sys

from tasks.terminal.command_line import Parser, RawHelp, positive, run


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(
        prog="python -m pipeline.job_service", description=__doc__, formatter_class=RawHelp
    )
    parser.add_argument("--port", type=positive, default=8099, help="port to listen on")
    return parser


def main(argv: list[str]) -> None:
    """Runs the service until SIGTERM or SIGINT."""
    port = command_line().parse_args(argv).port
    logging.basicConfig(level=logging.INFO)

    from pipeline.runners import pool_service

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    service = pool_service.create()
    service.start_grpc_server(port)
    print(f"accepting jobs on port {port}", flush=True)
    try:
        signal.pause()
    finally:
        service.stop()


if __name__ == "__main__":
    run(main)
