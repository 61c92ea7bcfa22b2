"""A run's data from caches: opens its tasks' caches and checks them against each other."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tasks.cache import subset
from tasks.cache.manifest import CacheManifest, as_json
from tasks.cache.pair_windows import PairWindows, check_kind, open_windows
from tasks.cache.subset import Take
from tasks.cache.windows import Windows
from tasks.document_kind import DocumentKind
from tasks.metrics import metric
from tasks.objectives import Lengths, noise
from tasks.objectives.packing import deck
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError, nearest
from trainer.config import Config, as_batches
from trainer.config.evaluation import TASK_METRICS
from trainer.data import features, mixing, segments, startup, task_record
from trainer.data.batches import BatchMaker, Source, TrainingBatches, evaluation_batches
from trainer.data.cached_task import CachedTask
from trainer.data.caches import TRAIN, caches_of
from trainer.data.epoch_rows import Decks, Layout, PackedPairs, PairRows
from trainer.data.examples import ExampleSet, judge_of, named_metrics, of_batches
from trainer.data.features import Batch, Converter
from trainer.data.interleave import MixingSchedule
from trainer.data.order import (
    BlockOrder,
    CacheOrder,
    Epochs,
    GlobalOrder,
    NestedOrder,
    Order,
    Reading,
)
from trainer.data.origins import Document, Origins
from trainer.data.run import EvaluationSet, Waiting
from trainer.data.run_batches import Batches
from trainer.monitoring import activity

# Rows per batch when reading examples.
_EXAMPLE_ROWS = 64


def _amounts(config: Config, tasks: list[str]) -> dict[str, Take]:
    """Returns how much `data.take` takes of each task; key "" means all tasks."""
    if config.data.take is None:
        return {}
    try:
        amounts = subset.parse(config.data.take)
    except ValueError as error:
        raise UserError(f"--data.take={config.data.take}: {error}") from error
    for name in amounts:
        if name and name not in tasks:
            raise UserError(f"--data.take: the run has no task {name}{nearest(name, tasks)}")
    return amounts


class CachedData:
    """Batches from the caches of a run's tasks; `training` is True if a run trains on them."""

    def __init__(
        self,
        config: Config,
        tasks: list[CachedTask],
        converter: Converter,
        training: bool = False,
        nest: Lengths | None = None,
    ):
        self._trains, self._packs = training, config.data.pack_examples
        self._config, self.tasks, self._converter = config, tasks, converter
        self._caches = caches_of(config)
        self.lengths = converter.lengths
        first = tasks[0]
        recorded = first.manifest.plan.vocabulary
        for other in tasks[1:]:
            if other.manifest.plan.vocabulary != recorded:
                raise UserError(
                    f"{first.cache} and {other.cache} have different vocabularies: build them with "
                    "the same --vocabulary"
                )
        self.vocab_size, self.vocabulary_sha256 = first.ids.size, recorded.sha256
        self.fingerprints = {each.task.name: each.manifest.plan.fingerprint for each in tasks}
        self._taken = _amounts(config, [each.task.name for each in tasks])
        for task in tasks:
            self._check(task)
        # If lengths change, windows lie in windows of the longest lengths. `nest` is given to the
        # data of another length, which `_later` makes.
        self._nest, self._changes = nest or config.phases.nest, nest is None
        if training:
            _ = self._later  # checks what changes

    @functools.cached_property
    def _later(self) -> "list[CachedData]":
        """The data of each later stage, whose lengths differ."""
        config, special = self._config, self.tasks[0].ids.special
        if not (self._nest and self._changes):
            return []
        startup.check_nest(config, self.tasks, self._caches)
        return [
            CachedData(
                config,
                self.tasks,
                features.converter(config.model, phase.lengths, special),
                self._trains,
                self._nest,
            )
            for phase in config.phases.stages[1:]
        ]

    def _check(self, each: CachedTask) -> None:
        config, objective = self._config, each.task.objective
        lengths = self.example_lengths(each.task)
        check_kind(each.cache, each.manifest, objective)
        self._check_inputs(each.task, lengths)
        try:
            objective.window_tokens(lengths)
        except UserError as error:
            flag = "--data.example_" if self._packs else "--lengths."
            raise UserError(
                f"{flag}inputs={lengths.inputs} {flag}targets={lengths.targets}: {error}"
            ) from error
        if config.data.segment_documents:
            segments.check(objective, lengths, self._converter_of(each))
            if each.manifest.plan.adopted:
                raise segments.Unsegmented(
                    f"{each.cache} was adopted and does not say where documents begin: leave out "
                    "--data.segment_documents"
                )
        self._caches.check_task(each, lengths, subset.of_task(self._taken, each.task.name))
        where = f"the vocabulary of {each.cache}"
        each.task.check(lengths, each.ids, each.manifest.plan.separator, where)

    def _converter_of(self, each: CachedTask) -> Converter:
        lengths = self.example_lengths(each.task)
        return features.converter(self._config.model, lengths, each.ids.special)

    def _check_inputs(self, task: TaskSpec, lengths: Lengths) -> None:
        """Rejects a task without inputs in a decoder-only run whose rows have inputs."""
        of_decoder = not self._config.model.has_encoder
        if not (of_decoder and lengths.inputs) or "inputs" in task.objective.features:
            return
        others = [each.task for each in self.tasks if "inputs" in each.task.objective.features]
        if others:
            names = ", ".join(each.name for each in others)
            raise UserError(
                f"{task.name} has no inputs, but {names} has; in a decoder-only run, either all "
                f"tasks have inputs or none does: replace {task.name} with one that has "
                "inputs, such as NAME_prefix_lm, or leave one of the two out"
            )
        raise UserError(
            f"--lengths.inputs={lengths.inputs} has no effect on {task.name}, whose examples have "
            "no inputs: leave it out"
        )

    def example_lengths(self, task: TaskSpec) -> Lengths:
        if not self._packs:
            return self.lengths
        own = self.lengths if task.objective.unit is DocumentKind.PAIR else task.lengths
        given = self._config.data
        return Lengths(given.example_inputs or own.inputs, given.example_targets or own.targets)

    @functools.cached_property
    def tasks_record(self) -> dict[str, Any]:
        rows = self.lengths if self._packs else None
        by_document = self._config.data.segment_documents
        return {
            cached.task.name: task_record.task_record(
                cached, self.example_lengths(cached.task), rows, by_document
            )
            for cached in self.tasks
        }

    def keep_vocabulary(self, folder: str) -> dict[str, Any]:
        first = self.tasks[0]
        if not first.ids.model:  # adopted without one
            return {}
        record = first.vocabulary.record
        path = files.join(folder, record.file_name)
        if not files.exists(path):
            files.write_bytes(path, first.model)
        return {"vocabulary": as_json(record)}

    @property
    def record(self) -> dict[str, Any]:
        names = [cached.task.name for cached in self.tasks]
        rates = [
            [step, [[name, rate] for name, rate in zip(names, shares, strict=True) if rate]]
            for step, shares in self.rates
        ]
        return {"tasks": self.tasks_record, "rates": rates}

    def maker(
        self,
        each: CachedTask,
        split: str,
        keep_tails: bool,
        packed: bool = False,
        manifest: CacheManifest | None = None,
    ) -> BatchMaker:
        objective, lengths = each.task.objective, self.example_lengths(each.task)
        reading = self._config.data
        windows = open_windows(
            each.cache,
            manifest or each.manifest,
            split,
            objective,
            lengths,
            keep_tails=keep_tails,
            local_dir=reading.local_dir,
            local_bytes=reading.local_bytes,
            within=None if keep_tails or not self._nest else objective.window_tokens(self._nest),
        )
        if packed:
            return BatchMaker(windows, objective, self._converter, each.ids, lengths)
        converter, by_document = self._converter_of(each), reading.segment_documents
        return BatchMaker(windows, objective, converter, each.ids, by_document=by_document)

    @functools.cached_property
    def sources(self) -> list[Source]:
        return [self._source(task) for task in self.tasks]

    def _source(self, each: CachedTask) -> Source:
        name = each.task.name
        seed = noise.task_seed(self._config.seed, name)
        self._check_room()
        open_as = functools.partial(self.maker, each, TRAIN, keep_tails=False, packed=self._packs)
        maker, reading = self._caches.reading(
            each,
            open_as,
            subset.of_task(self._taken, name),
            seed,
            lambda windows: self._order(windows, seed),
        )
        layout = self._layout(maker, reading, seed) if self._packs else None
        return Source(name, maker, reading, self._config.seed, layout)

    def _layout(self, maker: BatchMaker, reading: Reading, seed: int) -> Layout:
        objective, windows = maker.objective, maker.windows
        together = not self._config.model.has_encoder
        if not isinstance(windows, PairWindows):
            kinds = objective.kinds(maker.example_lengths)
            return Decks(reading, deck(kinds, self.lengths, together), seed)
        sides, lengths = objective.sides(maker.example_lengths), maker.example_lengths
        ends = (lengths.inputs - sides[0], lengths.targets - sides[1])
        shuffle = self._config.data.shuffle
        in_blocks = shuffle == "block"
        blocks = windows.blocks(self._config.data.block_bytes) if in_blocks else None
        plan = PackedPairs(windows, ends, self.lengths, together, blocks)
        order: Order = CacheOrder()
        if in_blocks:
            order = BlockOrder(plan.blocks_B1, seed)
        elif shuffle == "global":
            order = GlobalOrder(plan.rows, seed)
        return PairRows(plan, Epochs(plan.rows, order))

    def _check_room(self) -> None:
        reading, copied = self._config.data, files.is_remote(self._config.cache_dir)
        if reading.shuffle == "block" and copied and 2 * reading.block_bytes > reading.local_bytes:
            raise UserError(
                f"two blocks of --data.block_bytes={reading.block_bytes} are on the disk at a "
                f"time, but --data.local_bytes is {reading.local_bytes}"
            )

    def _order(self, windows: Windows, seed: int) -> Order:
        reading = self._config.data
        if self._nest:
            per = windows.per_outer
            return NestedOrder(
                len(windows) // per, per, seed if reading.shuffle == "global" else None
            )
        if reading.shuffle == "global":
            return GlobalOrder(len(windows), seed)
        if reading.shuffle == "none":
            return CacheOrder()
        return BlockOrder(windows.blocks(reading.block_bytes), seed)

    @functools.cached_property
    def rates(self) -> list[tuple[int, list[float]]]:
        manifests = {cached.task.name: cached.manifest for cached in self.tasks}
        return mixing.rates(self._config, self.sources, manifests, self._caches.knows_sizes)

    def batches(self, host: int = 0, hosts: int = 1) -> TrainingBatches:
        phases, later = self._config.phases, [each.sources for each in self._later]
        schedule = MixingSchedule([(phases.passed(step), rates) for step, rates in self.rates])
        return TrainingBatches(self.sources, phases, schedule, host, hosts, later)

    @property
    def config(self) -> dict[str, Any]:
        """The settings on which the batches depend, and the caches' fingerprints, as JSON."""
        return {**as_batches(self._config), "caches": self.fingerprints}

    def explain(self, k: int, row: int) -> list[Document]:
        """Returns the documents of a row of batch `k`, counted over all hosts."""
        return [*Origins(self, k).documents(row)]

    def training(
        self, first_step: int, host: int = 0, hosts: int = 1, waiting: Waiting | None = None
    ) -> Iterator[Batch]:
        reading = self._config.data
        batches = Batches(self, None, reading.threads, reading.prefetch).shard(host, hosts)
        batches.state = first_step
        return self._arriving(batches, waiting or Waiting())

    def _arriving(self, batches: Batches, waiting: Waiting) -> Iterator[Batch]:
        made, whole = iter(batches), self.batches()
        task, skips = self._config.task, self._config.data.skips
        for step in itertools.count(batches.state):
            waits = f"waiting for batch {skips.batch(step + 1)} of"
            with activity.doing(activity.DATA, f"{waits} {task}"):
                with waiting.timed():
                    arrived = self._wait(whole, step, waiting.stopping, waits)
                batch = next(made) if arrived else None
            if batch is None:
                return
            yield batch

    def _wait(
        self,
        batches: TrainingBatches,
        step: int,
        stopping: Callable[[], bool] = lambda: False,
        waits: str = "waiting for",
    ) -> bool:
        """Waits for a step's windows to be built; returns False if `stopping()` came first."""
        if all(each.whole for each in self.sources):
            return True
        for source, rank in batches.last_windows(step):
            with activity.doing(None, f"{waits} {source.task}, whose cache is being built"):
                if not source.reading.wait(rank, stopping):
                    return False
        return True

    def close(self) -> None:
        for task in self.tasks:
            self._caches.close(task)

    def evaluated(self, each: CachedTask, split: str) -> CacheManifest:
        return self._caches.evaluated(each, split, self._trains)

    def evaluation(self, split: str, batch_size: int) -> list[EvaluationSet]:
        """Returns a split's windows by task; skips, with a message, tasks without text in it."""
        sets = []
        for cached, maker in self.held_out(split):
            iterate = functools.partial(evaluation_batches, maker, batch_size, self._config.seed)
            batches = -(-len(maker.windows) // batch_size)
            sets.append(EvaluationSet(cached.task.name, batches, iterate))
        return sets

    def held_out(self, split: str) -> list[tuple[CachedTask, BatchMaker]]:
        """Returns the tasks with text in a split, and what makes its batches.

        Prints a line about each other task; raises UserError if there are only such.
        """
        found, empty = [], []
        for cached in self.tasks:
            known = split in cached.manifest.splits or len(self.tasks) == 1
            manifest = self.evaluated(cached, split) if known else None
            maker = self.maker(cached, split, True, manifest=manifest) if manifest else None
            if maker is None or not len(maker.windows):
                empty.append(cached)
                continue
            found.append((cached, maker))
        first = self._first_shards
        if not found:
            if first and first < empty[0].manifest.plan.shards.get(split, 0):
                raise UserError(
                    f"{empty[0].cache} has no text in the first {first:,} shards of {split}, which "
                    f"this run evaluates: {self._caches.more_shards}, or pretrain with "
                    "--evaluation.every_steps=0"
                )
            raise UserError(
                f"{empty[0].cache} has no text in split {split}: build with a larger share held "
                "out (--corpus='…?validation=0.1'), pretrain with --evaluation.every_steps=0, or "
                "give trainer.evaluate another --split"
            )
        where = f"its first {first:,} shards" if first else "it"
        for each in empty:
            print(
                f"{split}: {each.cache} has no text in {where}; {each.task.name} is not evaluated"
            )
        return found

    @property
    def _first_shards(self) -> int | None:
        """Number of leading shards of a split that evaluations read; None means all."""
        return self._caches.first_shards(self._trains)

    def examples(self, split: str) -> list[ExampleSet]:
        evaluation, metrics = self._config.evaluation, named_metrics(self._config)
        judge = judge_of(self._config)
        if judge and TASK_METRICS in evaluation.metrics:
            metrics = tuple(dict.fromkeys((*metric.chosen(judge.metrics), *metrics)))
        if not metrics:
            return []
        ids = {cached.task.name: cached.ids for cached in self.tasks}
        return [
            of_batches(rows.name, rows.iterate, ids[rows.name], metrics, judge)
            for rows in self.evaluation(split, _EXAMPLE_ROWS)
        ]

    def encode(self, text: str) -> list[int]:
        return self.tasks[0].vocabulary.encode([text])[0].tolist()

    def consequences(
        self, first_step: int = 0, host: int = 0, hosts: int = 1
    ) -> list[tuple[str, str]]:
        phases, skips = self._config.phases, self._config.data.skips
        rows = phases.passed(skips.batch(self._config.train_steps)) if not phases.nest else 0
        (_, shares), *changes = self.rates
        batches = self.batches(host, hosts)
        self._wait(batches, first_step)
        lines = [
            line
            for each, source in zip(self.tasks, self.sources, strict=True)
            for line in startup.task_lines(
                source,
                each,
                self.example_lengths(each.task),
                self.lengths,
                self._caches,
                self._taken,
            )
        ]
        lines += startup.law_lines(self.tasks)
        if rows and len(self.tasks) > 1 and all(source.whole for source in self.sources):
            lines += startup.mixture_lines(self.sources, shares, rows)
        names = [source.task for source in self.sources]
        lines += (
            startup.change_line(skips.updates(step), dict(zip(names, changed, strict=True)))
            for step, changed in changes
        )
        batch, specs = batches[first_step], [cached.task for cached in self.tasks]
        return [
            *lines,
            *startup.skip_lines(self._config.data),
            startup.batch_line(self.sources, self._config.batch_size, shares, rows),
            *startup.phase_lines(phases, self._config.train_steps),
            startup.packing_line(batch, [] if self._packs else specs, self.lengths),
        ]
