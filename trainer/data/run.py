"""A prepared run, and the interface of its data to the training loop and evaluations."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from tasks.cache.manifest import CacheManifest
from tasks.objectives import Lengths
from tasks.task import TaskSpec
from tasks.vocabulary import T5_IDS, SpecialIds, TokenIds
from trainer.config import Config
from trainer.data.batches import BatchMaker, Source, TrainingBatches
from trainer.data.cached_task import CachedTask
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
    def tasks(self) -> Sequence[CachedTask]:
        """The tasks with their caches; empty if another program makes the batches.

        The six members that follow are for data with tasks.
        """

    @property
    def sources(self) -> Sequence[Source]:
        """The tasks' training splits."""

    @property
    def rates(self) -> list[tuple[int, list[float]]]:
        """(updates made before, share of each task) for the first mixture and each change."""

    def batches(self, host: int = 0, hosts: int = 1) -> TrainingBatches:
        """Returns the training batches, or a host's rows of them."""

    def example_lengths(self, task: TaskSpec) -> Lengths:
        """Returns the lengths of a task's example: a row's, unless rows are packed."""

    def maker(
        self,
        each: CachedTask,
        split: str,
        keep_tails: bool,
        packed: bool = False,
        manifest: CacheManifest | None = None,
    ) -> BatchMaker:
        """Opens a split of a task's cache; `manifest` may list only some of the cache's shards."""

    def evaluated(self, each: CachedTask, split: str) -> CacheManifest:
        """Returns the manifest of the shards that evaluations read; waits for them if necessary."""

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


class DataVocabulary(NamedTuple):
    """The vocabulary of a run's data.

    `origin` is the origin of `model.vocab_size` if the data determine it, `place` names the
    vocabulary in messages, and `extra_ids` follow the file's pieces. None means unknown.
    """

    origin: str
    place: str
    size: int
    sha256: str | None
    extra_ids: int
    special: SpecialIds = T5_IDS
    ids: TokenIds | None = None


class Opened(NamedTuple):
    """What the source of a run's data says before the model is fitted to it.

    `config` has the fields that the source implies; `data` makes the run's data from the completed
    configuration and the converter.
    """

    config: Config
    vocabulary: DataVocabulary
    lengths: Lengths
    data: Callable[[Config, Converter], Data]


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
