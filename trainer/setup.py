"""From a configuration to the parts of a run: every check that needs no device is made here."""

import dataclasses

from tasks import files, manifest, registry
from tasks.command_line import UserError
from tasks.manifest import VOCABULARY, CacheManifest
from tasks.objectives import Lengths
from tasks.task import TaskSpec
from tasks.vocabulary import TokenIds
from tasks.windows import Windows
from trainer import config as configuration
from trainer.batches import BatchMaker
from trainer.config import Config
from trainer.features import FeatureConverter

# Rows of the embedding are a multiple of this, as T5's 32,128 for 32,100 ids: accelerators like it,
# and tensor parallelism divides it. Source: T5X `examples/t5/t5_1_1/base.gin`.
_VOCABULARY_MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and what it refers to."""

    config: Config
    task: TaskSpec
    cache: str
    manifest: CacheManifest
    lengths: Lengths
    converter: FeatureConverter

    ids: TokenIds

    def batch_maker(self, split: str, keep_tails: bool) -> BatchMaker:
        """Opens a split of the cache; `keep_tails` as in tasks.windows.Windows."""
        windows = Windows(
            self.cache,
            self.manifest,
            split,
            self.task.objective.window_tokens(self.lengths),
            keep_tails,
        )
        return BatchMaker(windows, self.task.objective, self.converter, self.ids)


def prepare(config: Config, origins: dict[str, str]) -> Run:
    """Fills in what task and cache imply, and refuses what cannot work.

    Raises:
      UserError: something is missing or does not fit; says which flag to set to what.
    """
    for name in ("task", "cache_dir", "model_dir"):
        if not getattr(config, name):
            raise UserError(f"--{name} is missing")
    for name, least in (("train_steps", 1), ("batch_size", 1)):
        if getattr(config, name) < least:
            raise UserError(f"--{name}={getattr(config, name)}: must be at least {least}")
    task = registry.get(config.task, config.task_module)
    cache = manifest.find_cache(config.cache_dir, task.name)
    found = CacheManifest.load(cache)
    config = _imply(config, origins, task, found)
    lengths = Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)
    encoder_decoder = config.model.num_encoder_layers > 0
    if not {*task.objective.features} <= {"inputs", "targets", "weights", "prefix"}:
        raise UserError(
            f"task {task.name} is for an encoder alone, which no preset is yet: choose another "
            "task, or read this one through tasks.seqio_tasks"
        )
    if encoder_decoder and not task.lengths.inputs:
        raise UserError(
            f"task {task.name} has no inputs, and preset {config.preset} has an encoder: "
            "choose a decoder-only preset (lm_small, …) or another task"
        )
    vocabulary = found.plan.vocabulary
    ids = TokenIds(
        vocabulary.size, vocabulary.sentinels, files.read_bytes(files.join(cache, VOCABULARY))
    )
    task.check(lengths, ids, found.plan.separator, f"the vocabulary of {cache}")
    if config.model.vocab_size < vocabulary.size:
        raise UserError(
            f"--model.vocab_size={config.model.vocab_size} is smaller than the vocabulary of the "
            f"cache, {vocabulary.size} ids"
        )
    converter = FeatureConverter(lengths, encoder_decoder)
    return Run(config, task, cache, found, lengths, converter, ids)


def _imply(config: Config, origins: dict[str, str], task: TaskSpec, found: CacheManifest) -> Config:
    for side in ("inputs", "targets"):
        if getattr(config.lengths, side) is None:
            value = getattr(task.lengths, side)
            config = configuration.replace(config, f"lengths.{side}", value)
            origins[f"lengths.{side}"] = f"task {task.name}"
    if origins.get("model.vocab_size") != "command line":
        size = -(-found.plan.vocabulary.size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        config = configuration.replace(config, "model.vocab_size", size)
        origins["model.vocab_size"] = "vocabulary of the cache"
    return config
