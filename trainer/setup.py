"""From a configuration to the parts of a run: every check that needs no device is made here."""

import dataclasses

from tasks.command_line import UserError
from tasks.objectives import Lengths
from tasks.task import TaskSpec
from trainer import config as configuration
from trainer.config import Config
from trainer.data import CachedData, Data, mixtures_of, open_cache
from trainer.features import FeatureConverter

SEQIO = "seqio:"

# Rows of the embedding are a multiple of this, as T5's 32,128 for 32,100 ids: accelerators like it,
# and tensor parallelism divides it. Source: T5X `examples/t5/t5_1_1/base.gin`.
_VOCABULARY_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and what it refers to."""

    config: Config
    data: Data
    converter: FeatureConverter

    @property
    def lengths(self) -> Lengths:
        """Of the features."""
        return self.data.lengths


def prepare(config: Config, origins: dict[str, str]) -> Run:
    """Fills in what tasks and caches imply, and refuses what cannot work.

    Raises:
      UserError: something is missing or does not fit; says which flag to set to what.
    """
    for name in ("task", "cache_dir", "model_dir"):
        if not getattr(config, name):
            raise UserError(f"--{name} is missing")
    for name, least in (("train_steps", 1), ("batch_size", 1)):
        if getattr(config, name) < least:
            raise UserError(f"--{name}={getattr(config, name)}: must be at least {least}")
    encoder_decoder = config.model.num_encoder_layers > 0
    names = dict.fromkeys(name for _, spec in mixtures_of(config) for name in spec.names)
    tasks = [open_cache(config, name) for name in names]
    for each in tasks:
        _check_task(each.task, encoder_decoder, config.preset)
        config = _imply_lengths(config, origins, each.task)
    config = _imply_vocabulary(
        config, origins, tasks[0].ids.size, "cache", f"the vocabulary of {tasks[0].cache}"
    )
    lengths = Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)
    converter = FeatureConverter(lengths, encoder_decoder)
    return Run(config, CachedData(config, tasks, converter), converter)


def _check_task(task: TaskSpec, encoder_decoder: bool, preset: str) -> None:
    if not {*task.objective.features} <= {"inputs", "targets", "weights", "prefix"}:
        raise UserError(
            f"task {task.name} is for an encoder alone, which no preset is yet: choose another "
            "task, or read this one through tasks.seqio_tasks"
        )
    if encoder_decoder and not task.lengths.inputs:
        raise UserError(
            f"task {task.name} has no inputs, and preset {preset} has an encoder: choose a "
            "decoder-only preset (lm_small, …) or another task"
        )


def _imply_lengths(config: Config, origins: dict[str, str], task: TaskSpec) -> Config:
    for side in ("inputs", "targets"):
        field = f"lengths.{side}"
        value, set_already = getattr(task.lengths, side), getattr(config.lengths, side)
        if set_already is None:
            config = configuration.replace(config, field, value)
            origins[field] = f"task {task.name}"
        elif origins.get(field, "").startswith("task ") and set_already != value:
            raise UserError(
                f"{origins[field]} has {side} of {set_already} and {task.name} of {value}: set "
                f"--{field}"
            )
    return config


def _imply_vocabulary(
    config: Config, origins: dict[str, str], size: int, origin: str, where: str
) -> Config:
    if origins.get("model.vocab_size") != "command line":
        rounded = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        config = configuration.replace(config, "model.vocab_size", rounded)
        origins["model.vocab_size"] = f"vocabulary of the {origin}"
    if config.model.vocab_size < size:
        raise UserError(
            f"--model.vocab_size={config.model.vocab_size} is smaller than {where}, {size} ids"
        )
    return config
