"""A prepared run, and the interface of its data to the training loop and evaluations."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from tasks.objectives import Lengths
from trainer.config import Config
from trainer.data.examples import ExampleSet
from trainer.data.features import Batch, Converter


class EvaluationSet(NamedTuple):
    """A finite set of rows, yielded by `iterate()`; `batches` is their count, None if unknown."""

    name: str
    batches: int | None
    iterate: Callable[[], Iterator[Batch]]


@dataclasses.dataclass
class Waiting:
    """A wait for unfinished data, which ends if `stopping()`; `seconds` is the time spent."""

    stopping: Callable[[], bool] = lambda: False
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time inside the block as time spent waiting."""
        begin = time.monotonic()
        yield
        self.seconds += time.monotonic() - begin


class Data(Protocol):
    """A run's data, as the training loop uses it; `vocab_size` is the number of ids."""

    @property
    def lengths(self) -> Lengths: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary_sha256(self) -> str | None:
        """SHA-256 of the caches' vocabulary, as hex digits; None for seqio tasks."""

    def keep_vocabulary(self, folder: str) -> dict[str, Any]:
        """Writes the vocabulary into a run's folder; returns {"vocabulary": its record} or {}."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Checksum of each task's data, which must not change during a run."""

    @property
    def tasks_record(self) -> dict[str, Any]:
        """Settings that determine each task's examples, as JSON (`trainer.data.task_record`)."""

    @property
    def record(self) -> dict[str, Any]:
        """`tasks_record` as "tasks"; "rates" lists [updates made before, [[task, share], …]]."""

    def training(
        self, first_step: int, host: int = 0, hosts: int = 1, waiting: Waiting | None = None
    ) -> Iterator[Batch]:
        """Yields the batches of steps first_step, first_step + 1, …, endlessly.

        Each batch has the rows of host `host`, one of `hosts` equal parts. A run that follows the
        build of its caches waits for them; batches end if `waiting.stopping()` turns true. Raises
        a UserError if a batch is unreadable or the build has ended.
        """

    def close(self) -> None:
        """Ends batch-making threads that are waiting."""

    def evaluation(self, split: str, batch_size: int) -> list[EvaluationSet]:
        """Returns a split's rows by task, each once and always with the same noise."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""

    def examples(self, split: str) -> list[ExampleSet]:
        """Returns the examples of a split by task, with the text metrics to compute."""

    def consequences(
        self, first_step: int = 0, host: int = 0, hosts: int = 1
    ) -> list[tuple[str, str]]:
        """Returns (subject, text) lines for the data; reads this host's rows of the first batch."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration, checked against the data that it refers to."""

    config: Config
    data: Data
    converter: Converter

    @property
    def lengths(self) -> Lengths:
        """Lengths of the features."""
        return self.data.lengths
