"""Estimates a sweep's cost before it runs: steps, tokens, operations and time."""

import dataclasses
import statistics
import timeit
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.sweeps import cells
from experiments.sweeps.cells import Cell, Stage
from tasks import registry
from tasks.cache.cache import find_cache
from tasks.cache.manifest import CacheManifest
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.config import Config, field_paths
from trainer.data import features
from trainer.data.mixing import mixtures_of
from trainer.reporting.metrics import read_metrics

# Seconds for imports and compilation before the first update.
_STARTUP_SECONDS = 15.0
# Small models' speed relative to one large product: a guess, used until cells have finished.
_UTILISATION = 0.3


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of all runs of a cell."""

    parameters: int
    steps: int
    tokens: int  # positions of inputs and targets in all updates
    operations: float  # floating-point operations of updates and evaluations
    update: float  # operations of an update of the first run
    runs: int

    def seconds(self, speed: float) -> float:
        """Returns the duration at `speed` operations per second."""
        return self.runs * _STARTUP_SECONDS + self.operations / speed


def cost(cell: Cell) -> Cost:
    """Returns the cost of a cell."""
    from trainer.engine.cost import parameter_count

    vocab_size = cell.vocab_size
    stages = [_stage(stage, vocab_size) for stage in cell.stages]
    steps, tokens, updates, evaluations = (sum(column) for column in zip(*stages, strict=True))
    model = _fitted(cell.config, vocab_size).model
    update = stages[0][2] / stages[0][0]
    return Cost(parameter_count(model), steps, tokens, updates + evaluations, update, len(stages))


def _fitted(config: Config, vocab_size: int | None) -> Config:
    manifest = _manifest(config)
    if manifest:
        vocab_size = manifest.plan.vocabulary.size
    if vocab_size is None:
        return config
    return field_paths.replace(config, "model.vocab_size", -(-vocab_size // 128) * 128)


def _stage(stage: Stage, vocab_size: int | None) -> tuple[int, int, float, float]:
    """Returns updates and tokens of a run, and operations of its updates and evaluations."""
    from trainer.engine.cost import flops_per_step

    config = cells.in_steps(_fitted(stage.config, vocab_size))
    sides = _positions(config, Lengths(config.lengths.inputs or 0, config.lengths.targets or 0))
    update = flops_per_step(config.model, config.batch_size, *sides)
    evaluated = 0.0
    every = config.evaluation.every_steps
    manifest = _manifest(config)
    if every and manifest and "validation" in manifest.splits:
        rows = manifest.total("validation", "tokens") / sum(sides)
        if config.evaluation.batches:
            size = config.evaluation.batch_size or config.batch_size
            rows = min(rows, config.evaluation.batches * size)
        # A forward pass is a third of an update.
        evaluated = -(-config.train_steps // every) * rows * update / config.batch_size / 3
    steps = config.train_steps
    phases, model = config.phases, config.model
    read = phases.weighted(lambda each: each.rows * sum(_positions(config, each.lengths)))
    made = phases.weighted(
        lambda each: flops_per_step(model, each.rows, *_positions(config, each.lengths))
    )
    return steps, read.read(steps), made.read(steps), evaluated


def _positions(config: Config, lengths: Lengths) -> tuple[int, int]:
    """Returns the positions of a row's encoder and decoder sides."""
    made = features.converter(config.model, lengths)
    return made.encoder_length, made.decoder_length


def _manifest(config: Config) -> CacheManifest | None:
    try:
        name = next(name for _, spec in mixtures_of(config) for name in spec.names)
        task = registry.get(name, config.task_module)
        relatives = registry.relatives(task, config.task_module)
        return CacheManifest.load(find_cache(config.cache_dir, name, relatives), check=False)
    except UserError:
        return None


def speed(finished: Sequence[tuple[Cell, str]], costs: Mapping[str, Cost]) -> tuple[float, str]:
    """Returns operations per second, of finished cells or of a matrix product, and their source."""
    found = []
    for cell, folder in finished:
        rates = [
            line.get("speed", {}).get("steps_per_second")
            for line in read_metrics(files.join(folder, cell.stages[0].folder))
        ]
        known = [rate for rate in rates if rate]
        if known:
            found.append(statistics.median(known) * costs[cell.label].update)
    if found:
        return statistics.median(found), f"measured on {len(found)} finished cells"
    matrix: Any = np.ones((1024, 1024), np.float32)
    seconds = min(timeit.repeat(lambda: matrix @ matrix, number=1))
    product = 2 * len(matrix) ** 3 / seconds
    return _UTILISATION * product, "measured by a matrix product on this machine's CPU"


def finished(cell: Cell, output: str) -> str | None:
    """Returns a cell's folder in a sweep's folder, or None if the cell is not finished."""
    try:
        key = cell.key()
    except UserError:  # no cache yet
        return None
    folder = files.join(output, cells.folder_of(cell, key))
    found = cells.load_record(folder, key).get("status") == cells.FINISHED
    return folder if found else None
