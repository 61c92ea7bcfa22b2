"""Builds on other processes or machines, through Beam's portable runner.

Beam sends the pipeline to a job service: `pipeline.job_service` with a `pipeline.worker_pool` per
machine, or Flink's or Spark's. All workers need Palimpsest, and the same paths to corpus and cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.runners import failures
from pipeline.runners.beam_options import PORTABLE, runner_name
from tasks.terminal.command_line import UserError
from tasks.terminal.programs import program

# Prefix of pipeline.job_service's errors if a worker is lost or a pool does not answer.
LOST = "a worker is lost: "
_RESUME = "finished shards are kept; run the same command again to resume"


def is_runner(runner: str) -> bool:
    """Returns whether a --runner uses a job service."""
    return runner_name(runner) in PORTABLE


def _options(arguments: list[str]) -> Any:
    from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions

    return PipelineOptions(arguments).view_as(PortableOptions)


def check(arguments: list[str], corpus: object, folder: str) -> None:
    """Raises a UserError without --job_endpoint, or if no service answers there."""
    endpoint = _options(arguments).job_endpoint
    if not endpoint:
        if arguments[0].endswith("PortableRunner"):
            raise UserError(
                "--runner=PortableRunner needs --job_endpoint=HOST:PORT of a running job service: "
                f"{program('pipeline.job_service')} --port=PORT"
            )
        return
    if endpoint == "embed":
        return
    if reason := failures.unreachable([endpoint]):
        raise UserError(
            f"no job service answers at --job_endpoint={reason}: start one with "
            f"{program('pipeline.job_service')} --port=PORT, or correct the address"
        )


@contextmanager
def prepared(arguments: list[str], folder: str) -> Iterator[list[str]]:
    """Yields Beam's arguments, with one worker per pool unless a number is given."""
    options = _options(arguments)
    pools = (options.environment_config or "").split(",")
    if options.environment_type == "EXTERNAL" and len(pools) > 1:
        arguments = [f"--direct_num_workers={len(pools)}", *arguments]  # a later flag overrides it
    yield arguments


def announce(result: Any, arguments: list[str]) -> None:
    """Prints nothing: there is no page to link to."""


def cancel(result: Any, arguments: list[str]) -> None:
    result.cancel()


def explain(error: BaseException, arguments: list[str]) -> UserError | None:
    """Returns a UserError for a known failure of the job, or None."""
    text = str(error)
    if LOST in text:
        reason = text.partition(LOST)[2].splitlines()[0]
        return UserError(f"{LOST}{reason}; {_RESUME}")
    if type(error).__module__.partition(".")[0] == "grpc":
        return UserError(
            f"lost connection to the job service at {_options(arguments).job_endpoint} "
            f"({' '.join(text.split())[:200]}); {_RESUME}"
        )
    return None
