"""Runs builds on worker pools of several machines.

    python -m pipeline.worker_pool --port=50001      # on every machine
    python -m pipeline.job_service --port=8099 --host=HOST   # on one machine
    python -m pipeline.build … --runner=PortableRunner --job_endpoint=HOST:8099 \\
        --environment_type=EXTERNAL --environment_config=HOST1:50001,HOST2:50001

Workers are spread over the pools. If a worker is lost, the job ends with an error; finished shards
are kept, and the same command resumes. (Beam's own service supports one pool, hangs when a worker
is lost, and leaves orphaned workers running.)

Builds are accepted from this machine only. --host=ADDRESS, this machine's own name or address in a
network, accepts them from that network. There is no authentication and no encryption: anyone who
reaches the port can run code here and in the pools.
"""

import dataclasses
import logging
import signal
import sys

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import at_least, field

LOCALHOST = "localhost"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    port: int = field(8099, "port to listen on", rule=at_least(1))
    host: str = field(
        LOCALHOST,
        "name or address of this machine to listen on and to give to builds and workers; anyone "
        "who reaches it can run code here (default: localhost, builds on this machine only)",
    )


def run(flags: Flags) -> None:
    """Runs the service until SIGTERM or SIGINT."""
    host, port = flags.host, flags.port
    if host in ("0.0.0.0", "::", "[::]"):
        raise UserError(
            f"--host={host} is not an address that builds and workers can connect to: give this "
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


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
