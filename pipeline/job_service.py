"""Runs builds on pools of workers: Beam's job service for several machines.

    python -m pipeline.worker_pool --port=50001      # on every machine
    python -m pipeline.job_service --port=8099 --host=HOST   # on one machine
    python -m pipeline.build … --runner=PortableRunner --job_endpoint=HOST:8099 \\
        --environment_type=EXTERNAL --environment_config=HOST1:50001,HOST2:50001

Workers are spread over the pools. If a worker is lost, the job ends with an error; finished shards
are kept, and the same command resumes. (Beam's own service supports one pool, hangs when a worker
is lost and leaves orphaned workers running.)

Builds are accepted from this machine only. --host=ADDRESS, this machine's own name or address in a
network, accepts them from that network. There is no authentication and no encryption: anyone who
reaches the port can run code here and in the pools.
"""

import logging
import signal
import sys

from tasks.terminal.command_line import Parser, RawHelp, UserError, positive, run

LOCALHOST = "localhost"


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(
        prog="python -m pipeline.job_service", description=__doc__, formatter_class=RawHelp
    )
    parser.add_argument("--port", type=positive, default=8099, help="port to listen on")
    parser.add_argument(
        "--host",
        default=LOCALHOST,
        help="name or address of this machine to listen on and to give to builds and workers; "
        "anyone who reaches it can run code here (default: %(default)s, builds on this machine "
        "only)",
    )
    return parser


def main(argv: list[str]) -> None:
    """Runs the service until SIGTERM or SIGINT."""
    arguments = command_line().parse_args(argv)
    host, port = arguments.host, arguments.port
    if host in ("0.0.0.0", "::", "[::]"):
        raise UserError(
            f"--host={host} is no address that builds and workers can connect to: give this "
            "machine's name or its address in the network"
        )
    logging.basicConfig(level=logging.INFO)

    from pipeline.runners import pool_service

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    service = pool_service.create(host)
    try:
        service.start_grpc_server(port)
    except RuntimeError as error:  # grpc's error, whose reason is in its log
        raise UserError(
            f"cannot listen on {host}:{port}: --host must be this machine's, and no other program "
            "may use --port"
        ) from error
    print(f"accepting jobs on {host}:{port}", flush=True)
    try:
        signal.pause()
    finally:
        service.stop()


if __name__ == "__main__":
    run(main)
