"""The subject of a plan: a configuration without data, completed from flags or its task."""

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from tasks import mixture, registry
from tasks.objectives import Lengths
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from trainer.config import Config, field_paths
from trainer.config.batch_of_tokens import batch_of_tokens
from trainer.config.phases import in_updates
from trainer.data import features, segments
from trainer.data.features import Batch, Converter
from trainer.setup import prepare


@dataclasses.dataclass(frozen=True)
class Subject:
    """A run known only by shapes, enough for a `Program`; `features` names its examples' fields."""

    config: Config
    converter: Converter
    features: frozenset[str]

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of encoder and decoder positions."""
        return self.converter.encoder_length, self.converter.decoder_length

    @property
    def rows(self) -> int:
        """The rows of the largest batch."""
        return max(self.config.phases.sizes)

    def with_values(self, values: dict[str, Any]) -> Self:
        """Returns the subject with fields set; raises UserError if the configuration is invalid."""
        return dataclasses.replace(self, config=field_paths.replace_all(self.config, values))

    def row(self) -> Batch:
        """Returns a batch of one row with all features of the run's batches."""
        token, length = np.ones((1, 1), np.int32), np.ones(1, np.int32)
        examples = {name: (token, length) for name in self.features}
        reading = self.config.data
        if reading.pack_examples and "inputs" in examples:
            return self.converter.packed(examples, np.zeros(1, np.int64), 1)
        batch = self.converter(examples)
        if not reading.segment_documents:
            return batch
        return segments.segmented(batch, dict.fromkeys(examples, token), self.converter)


def leave_devices() -> None:
    """Computes on the CPU from now on: one process can have an accelerator, and others need it."""
    jax.config.update("jax_platforms", "cpu")


def subject(config: Config, origins: dict[str, str], devices: int) -> Subject:
    """Completes a configuration for `devices` from its cache, or from its task and flags."""
    if config.engine != "palimpsest":
        raise UserError(f"--engine={config.engine}: only steps of this trainer can be planned")
    if config.length_schedule:
        raise UserError(
            "--length_schedule: lengths are planned one by one: leave it out, and set --lengths "
            "and --batch_size to those of a phase"
        )
    if config.task and config.cache_dir:
        config = field_paths.replace(config, "model_dir", config.model_dir or "unused")
        run = prepare(config, origins)
        return Subject(run.config, run.converter, _features(run.config))
    if config.cache_dir:
        raise UserError("--cache_dir needs a --task")
    config = _in_rows(config, origins, devices)
    converter = features.converter(config.model, _lengths(config))
    return Subject(config, converter, _features(config))


def of_longest_rows(config: Config, origins: dict[str, str], devices: int) -> Config:
    """Returns the configuration of a run with the longest lengths of its `length_schedule` alone.

    Its updates and rows are those that the schedule makes of numbers of tokens.
    """
    config = _in_rows(config, origins, devices)
    longest = vars(config.phases.longest).items()
    values: dict[str, Any] = {f"lengths.{side}": length or None for side, length in longest}
    done = ("tokens_per_batch", "tokens_per_microbatch_per_replica")
    return field_paths.replace_all(config, {**values, **dict.fromkeys(done), "length_schedule": ""})


def _in_rows(config: Config, origins: dict[str, str], devices: int) -> Config:
    """Returns a configuration with all lengths, and with tokens converted to rows and updates."""
    config = _with_lengths(config)
    return in_updates(batch_of_tokens(config, origins, _lengths(config), devices), origins)


def _lengths(config: Config) -> Lengths:
    return Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)


def first_task(config: Config) -> TaskSpec | None:
    """Returns the run's first task; None without a task or for a seqio task."""
    if not config.task or config.data_scheme:
        return None
    known = registry.mixtures(config.task_module)
    first = (known.get(config.task) or mixture.parse(config.task)).names[0]
    return registry.get(first, config.task_module)


def _with_lengths(config: Config) -> Config:
    task = first_task(config)
    named = task and task.lengths
    model = config.model
    for side in ("inputs",) * model.has_encoder + ("targets",) * model.has_decoder:
        value = getattr(config.lengths, side)
        value = value if value is not None else named and getattr(named, side)
        if not value:
            what = " is missing" if value is None else "=0 is for decoder-only models"
            raise UserError(
                f"--lengths.{side}{what}: set it in tokens (such as --lengths.inputs=512 "
                "--lengths.targets=114), or name a --task to take its lengths"
            )
        config = field_paths.replace(config, f"lengths.{side}", value)
    if not model.has_encoder and named and config.lengths.inputs is None:
        config = field_paths.replace(config, "lengths.inputs", named.inputs)
    return config


def _features(config: Config) -> frozenset[str]:
    """Returns the examples' features, which decide the batch's features."""
    if not config.model.has_decoder:
        return frozenset({"inputs", "targets", "weights", "segments", "order"})
    if config.lengths.inputs:
        return frozenset({"inputs", "targets"})
    task = first_task(config)
    return frozenset({"targets", *(task.objective.features if task else ())})
