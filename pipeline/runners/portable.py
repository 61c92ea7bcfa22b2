"""A build by workers of other processes or machines, through Beam's portable runner.

Beam gives the pipeline to a job service: ours (`pipeline.job_service`, with a
`pipeline.worker_pool` on every machine), Flink's or Spark's. All workers need our packages,
installed, and see the corpus and the cache under the same paths.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.terminal.command_line import UserError

_RUNNERS = ("PortableRunner", "FlinkRunner", "SparkRunner")
# What pipeline.job_service says where a worker is gone or a pool does not answer.
LOST = "a worker is lost: "
_GO_ON = "what is finished is kept, give the same command again to go on"
_CONNECT_SECONDS = 10


def is_runner(runner: str) -> bool:
    """Whether a --runner gives jobs to a job service."""
    return runner.rsplit(".", 1)[-1] in _RUNNERS


def _options(arguments: list[str]) -> Any:
    from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

    return PipelineOptions(arguments).view_as(PortableOptions)


def check(arguments: list[str]) -> None:
    """Finds out before anything is read whether a job service is there.

    Raises:
      UserError: no --job_endpoint, or nobody answers there.
    """
    endpoint = _options(arguments).job_endpoint
    if not endpoint:
        if arguments[0].endswith("PortableRunner"):
            raise UserError(
                "--runner=PortableRunner needs --job_endpoint=HOST:PORT, where a job service "
                "listens: python -m pipeline.job_service --port=PORT"
            )
        return
    if endpoint == "embed":
        return
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(
            f"no job service answers at --job_endpoint={endpoint} ({error}): start one, "
            "python -m pipeline.job_service --port=PORT, or mend the address"
        ) from error


@contextmanager
def prepared(arguments: list[str], folder: str) -> Iterator[list[str]]:
    """Yields Beam's arguments: as many workers as there are addresses of pools, unless given."""
    options = _options(arguments)
    pools = (options.environment_config or "").split(",")
    if options.environment_type == "EXTERNAL" and len(pools) > 1:
        arguments = [f"--direct_num_workers={len(pools)}", *arguments]  # the last one counts
    yield arguments


def announce(result: Any, arguments: list[str]) -> None:
    """There is nothing to say: progress is shown from the cache's folder."""


def cancel(result: Any, arguments: list[str]) -> None:
    """Cancels the job."""
    result.cancel()


def explain(error: BaseException, arguments: list[str]) -> UserError | None:
    """Returns what a failure of the job means to the user, if we know."""
    text = str(error)
    if LOST in text:
        reason = text.partition(LOST)[2].splitlines()[0]
        return UserError(f"{LOST}{reason}; {_GO_ON}")
    if type(error).__module__.partition(".")[0] == "grpc":
        return UserError(
            f"the job service at {_options(arguments).job_endpoint} is gone "
            f"({' '.join(text.split())[:200]}); {_GO_ON}"
        )
    return None
