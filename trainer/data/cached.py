"""What a run reads: the caches of its tasks, opened and checked against one another."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from tasks import mixture, registry
from tasks.cache.cache import Cache, find_cache
from tasks.cache.manifest import CacheManifest
from tasks.cache.windows import Windows
from tasks.mixture import MixtureSpec
from tasks.objectives import Lengths, noise
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from trainer.config import Config, fields
from trainer.data.batches import BatchMaker, Source, TrainingBatches, evaluation_batches
from trainer.data.features import Batch, Converter, filling
from trainer.data.interleave import Schedule
from trainer.data.order import BlockOrder, CacheOrder, GlobalOrder, Order
from trainer.data.padding import WASTEFUL, better_lengths, packing


class EvaluationSet(NamedTuple):
    """A finite set of rows: `batches` of them, None if nobody knows, given by `iterate()`."""

    name: str
    batches: int | None
    iterate: Callable[[], Iterator[Batch]]


class Data(Protocol):
    """What the loop asks of a run's data.

    Attributes:
      lengths: of the features.
      vocab_size: number of ids.
    """

    @property
    def lengths(self) -> Lengths: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprints(self) -> dict[str, str]:
        """What must not change under a run, by task."""

    def training(self, first_step: int, host: int = 0, hosts: int = 1) -> Iterator[Batch]:
        """Yields the batches of steps first_step, first_step + 1, … without end: part `host` of
        `hosts` equal parts of the rows of each."""

    def evaluation(self, split: str, batch_size: int) -> list[EvaluationSet]:
        """The rows of a split, each once and always with the same noise, task by task.

        Raises:
          UserError: there are none.
        """

    def consequences(
        self, first_step: int = 0, host: int = 0, hosts: int = 1
    ) -> list[tuple[str, str]]:
        """What the configuration means for the data: (subject, text) lines. Of the first batch only
        the rows that this host makes are looked at."""


@dataclasses.dataclass(frozen=True)
class CachedTask:
    """A task of a run and the cache that serves it."""

    task: TaskSpec
    cache: str
    manifest: CacheManifest
    ids: TokenIds


def open_cache(config: Config, name: str) -> CachedTask:
    """Finds a task and its cache; a cache of another task on the same corpus serves too.

    Raises:
      UserError: there is no such task or cache.
    """
    task = with_settings(registry.get(name, config.task_module), config.objective)
    relatives = [
        other.name
        for other in registry.tasks(config.task_module).values()
        if other.corpus == task.corpus
    ]
    cache = Cache.open(find_cache(config.cache_dir, task.name, relatives))
    return CachedTask(task, cache.folder, cache.manifest, cache.ids)


def with_settings(task: TaskSpec, settings: tuple[str, ...]) -> TaskSpec:
    """Returns the task with fields of its objective set, each as "mask.noise_density=0.5".

    Raises:
      UserError: the objective has no such field, or refuses the value.
    """
    objective = task.objective
    for setting in settings:
        path, _, text = setting.partition("=")
        known = {name for name, _ in fields.leaves(objective)}
        if path not in known:
            listed = ", ".join(sorted(known)) or "nothing that can be set"
            raise UserError(
                f"--objective={setting}: the objective of {task.name} has no field {path}; it has "
                f"{listed}"
            )
        declared = fields.field_type(objective, path)
        try:
            value = fields.parse_value(text, declared)
        except ValueError as error:
            kind = getattr(declared, "__name__", declared)
            raise UserError(f"--objective={setting}: not a value of type {kind}") from error
        objective = fields.replace(objective, path, value)
    return dataclasses.replace(task, objective=objective)


def mixtures_of(config: Config) -> list[tuple[int, MixtureSpec]]:
    """The mixture of the run's beginning and those of its schedule: (updates made before, it)."""
    known = registry.mixtures(config.task_module)
    first = known.get(config.task) or mixture.parse(config.task)
    entries = [(0, first), *mixture.parse_schedule(config.mixing.schedule)]
    changed = {
        name: value
        for name in ("maximum", "temperature")
        if (value := getattr(config.mixing, name)) is not None
    }
    if len(first.tasks) == 1 and changed:
        raise UserError(f"--mixing.{next(iter(changed))} has no effect: {config.task} is one task")
    return [
        (step, mixture.checked(**{**dataclasses.asdict(each), **changed})) for step, each in entries
    ]


class CachedData:
    """The caches of a run's tasks as batches.

    Raises:
      UserError: the tasks cannot be read together; says why.
    """

    def __init__(self, config: Config, tasks: list[CachedTask], converter: Converter):
        self._config, self.tasks, self._converter = config, tasks, converter
        self.lengths = converter.lengths
        first = tasks[0]
        for other in tasks[1:]:
            if other.manifest.plan.vocabulary != first.manifest.plan.vocabulary:
                raise UserError(
                    f"{first.cache} and {other.cache} have different vocabularies: build them with "
                    "the same --vocabulary"
                )
        for each in tasks:
            where = f"the vocabulary of {each.cache}"
            each.task.check(self.lengths, each.ids, each.manifest.plan.separator, where)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self.tasks[0].ids.size

    @property
    def fingerprints(self) -> dict[str, str]:
        """The plan of every task's cache."""
        return {each.task.name: each.manifest.plan.fingerprint for each in self.tasks}

    def maker(self, each: CachedTask, split: str, keep_tails: bool) -> BatchMaker:
        """Opens a split of a task's cache; `keep_tails` as in tasks.cache.windows.Windows."""
        objective = each.task.objective
        window = objective.window_tokens(self.lengths)
        reading = self._config.data
        windows = Windows(
            each.cache,
            each.manifest,
            split,
            window,
            keep_tails,
            reading.local_dir,
            reading.local_bytes,
        )
        return BatchMaker(windows, objective, self._converter, each.ids)

    @functools.cached_property
    def sources(self) -> list[Source]:
        """The tasks' training splits."""
        sources = []
        for each in self.tasks:
            maker = self.maker(each, "train", keep_tails=False)
            name, seed = each.task.name, self._config.seed
            order = self._order(maker.windows, noise.task_seed(seed, name))
            sources.append(Source(name, maker, order, seed))
        return sources

    def _order(self, windows: Windows, seed: int) -> Order:
        reading = self._config.data
        if reading.shuffle == "global":
            return GlobalOrder(len(windows), seed)
        if reading.shuffle == "none":
            return CacheOrder()
        if 2 * reading.block_bytes > reading.local_bytes:
            raise UserError(
                f"two blocks of --data.block_bytes={reading.block_bytes} are on the disk at a "
                f"time, and --data.local_bytes is {reading.local_bytes}"
            )
        return BlockOrder(windows.blocks(reading.block_bytes), seed)

    @functools.cached_property
    def rates(self) -> list[tuple[int, list[float]]]:
        """(updates made before, share of each task) from each change of the mixture on."""
        examples = {source.task: len(source.maker.windows) for source in self.sources}
        changes = []
        for step, spec in mixtures_of(self._config):
            weights = spec.weights(examples)
            total = sum(weights.values())
            changes.append((step, [weights.get(name, 0.0) / total for name in examples]))
        return changes

    def batches(self, host: int = 0, hosts: int = 1) -> TrainingBatches:
        """The training batches, or a host's rows of them."""
        size = self._config.batch_size
        schedule = Schedule([(step * size, rates) for step, rates in self.rates])
        return TrainingBatches(self.sources, size, schedule, host, hosts)

    def training(self, first_step: int, host: int = 0, hosts: int = 1) -> Iterator[Batch]:
        """Yields the batches of steps first_step, first_step + 1, … without end, or a host's rows
        of them."""
        reading = self._config.data
        return self.batches(host, hosts).iterate(first_step, reading.threads, reading.prefetch)

    def evaluation(self, split: str, batch_size: int) -> list[EvaluationSet]:
        """Every window of the split, the tails of shards included, by task.

        Raises:
          UserError: a task's cache has no such split, or no text in it.
        """
        sets = []
        for each in self.tasks:
            maker = self.maker(each, split, keep_tails=True)
            if not len(maker.windows):
                raise UserError(
                    f"{each.cache} has no text in split {split}: evaluate on another split, or set "
                    "--evaluation.every_steps=0"
                )
            iterate = functools.partial(evaluation_batches, maker, batch_size, self._config.seed)
            sets.append(
                EvaluationSet(each.task.name, -(-len(maker.windows) // batch_size), iterate)
            )
        return sets

    def consequences(
        self, first_step: int = 0, host: int = 0, hosts: int = 1
    ) -> list[tuple[str, str]]:
        """What the configuration means for the data: (subject, text) lines."""
        lines = []
        batch_size, steps = self._config.batch_size, self._config.train_steps
        shares = self.rates[0][1]
        tokens_a_step = 0.0
        for each, source, share in zip(self.tasks, self.sources, shares, strict=True):
            objective, windows = each.task.objective, source.maker.windows
            window, plan = windows.window_tokens, each.manifest.plan
            tokens_a_step += window * batch_size * share
            epoch = len(windows) / (batch_size * share) if share else float("inf")
            lines += [
                (
                    "task",
                    f"{each.task.name}: {window} corpus tokens -> inputs {self.lengths.inputs}, "
                    f"targets {self.lengths.targets}",
                ),
                (
                    "sentinels",
                    f"{objective.sentinels(self.lengths)} needed, {plan.vocabulary.sentinels} in "
                    f"the vocabulary of {plan.vocabulary.size} ids",
                ),
                (
                    "cache",
                    f"{each.cache}: {each.manifest.total('train', 'tokens'):,} tokens, "
                    f"{len(windows):,} windows, {plan.packing}",
                ),
            ]
            reading = self._config.data
            if (
                files.is_remote(each.cache)
                and reading.shuffle == "global"
                and windows.bytes > reading.local_bytes
            ):
                lines.append(
                    (
                        "warning",
                        f"{windows.bytes:,} bytes are read in global order, and copies take "
                        f"{reading.local_bytes:,} at most, so shards are copied again and again: "
                        "set --data.local_bytes, or --data.shuffle=block",
                    )
                )
            if len(self.tasks) > 1:
                lines.append(
                    (
                        "rate",
                        f"{share:.4%} of the rows, {epoch:,.1f} steps an epoch, "
                        f"{steps / epoch:,.2f} epochs at this rate",
                    )
                )
        lines += [
            ("", f"from update {step + 1:,} on: {self._shares(rates)}")
            for step, rates in self.rates[1:]
        ]
        text = f"{batch_size} rows, {tokens_a_step:,.0f} corpus tokens a step"
        if len(self.tasks) == 1:
            epoch = len(self.sources[0].maker.windows) / batch_size
            text += f", {epoch:,.1f} steps an epoch, {steps / epoch:,.2f} epochs in all"
        return [*lines, ("batch", text), *self._filling(self.batches(host, hosts)[first_step])]

    def _shares(self, rates: list[float]) -> str:
        return ", ".join(
            f"{each.task.name} {share:.4%}" for each, share in zip(self.tasks, rates, strict=True)
        )

    def _filling(self, batch: Batch) -> list[tuple[str, str]]:
        """How full a batch is, and which lengths would waste less."""
        text = packing(batch)
        if len(self.tasks) == 1 and min(filling(batch).values()) < WASTEFUL:
            text += better_lengths(self.tasks[0].task, self.lengths)
        return [("packing", text)]
