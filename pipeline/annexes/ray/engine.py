"""A job on Ray: on a cluster, or on this machine if none is named.

A piece is a task of its own. Ray repeats the tasks of lost workers and nodes, and every piece has
one result, which counts once.
"""

import contextlib
import dataclasses
import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipeline.runners import failures
from pipeline.runners.engines import FlagsOfFields
from tasks.reading.corpus import CorpusSpec
from tasks.terminal import extras
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field

# Tasks known to the cluster at a time.
_WINDOW = 1000
# Repetitions of a task whose worker or node was lost.
_RETRIES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ray(FlagsOfFields):
    """Ray, as an engine (`engines.Engine`)."""

    address: str | None = field(
        None,
        "HOST:PORT of the cluster's head, ray://HOST:PORT or auto; by default RAY_ADDRESS, else "
        "this machine",
    )
    verbose: bool = False
    is_local = False
    bill = None

    @property
    def _head(self) -> str | None:
        return self.address or os.environ.get("RAY_ADDRESS")

    def check(self, corpus: CorpusSpec, folder: str) -> None:
        with extras.needed("--runner=ray", "ray"):
            import ray  # noqa: F401
        head = self._head or ""
        if ":" in head and (reason := failures.unreachable([head.removeprefix("ray://")])):
            raise UserError(f"no Ray cluster answers at --address={reason}")

    def run(
        self, work: Callable[[Any], Mapping[str, int]], pieces: Sequence[Any], folder: str
    ) -> Counter[str]:
        import ray

        with failures.job(self.verbose, _explained), self._connected():
            call = ray.put(failures.Call(work, folder))
            task = ray.remote(max_retries=_RETRIES)(_called)
            numbered = enumerate(pieces)
            counts = Counter[str]()
            waiting: list[Any] = []
            while True:
                for number, piece in itertools.islice(numbered, _WINDOW - len(waiting)):
                    named = task.options(name=f"{folder.rpartition('/')[2]} {number}")
                    waiting.append(named.remote(call, piece))
                if not waiting:
                    return counts
                (done,), waiting = ray.wait(waiting)
                counts.update(ray.get(done))

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Connects to the cluster, and prints the address of its page."""
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        level = logging.INFO if self.verbose else logging.ERROR
        context = ray.init(self._head, log_to_driver=self.verbose, logging_level=level)
        try:
            if page := context.dashboard_url:
                print(f"Ray's page: http://{page}", flush=True)
            yield
        finally:
            ray.shutdown()


def _called(call: failures.Call, piece: Any) -> Mapping[str, int]:
    return call(piece)


def _explained(error: BaseException) -> UserError | None:
    """Returns a UserError for a failure of the cluster or of a worker's Python."""
    text = " ".join(str(error).split())
    if explained := failures.of_environment(text, "Ray's workers run the Python of `ray start`"):
        return explained
    if "Version mismatch" in text:
        return UserError(f"{text[:300]}: run the same versions here and on the cluster")
    if isinstance(error, ConnectionError):
        return UserError(f"Ray: {text[:300]}; {failures.RESUME}")
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError) or not isinstance(error, exceptions.RayError):
        return None
    return UserError(f"Ray stopped the job ({text[:300]}); {failures.RESUME}")
