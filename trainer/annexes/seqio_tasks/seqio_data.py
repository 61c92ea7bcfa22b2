"""A run's data from any task or mixture registered with seqio, read by TensorFlow.

T5X users' own Tasks train here unchanged, with seqio's reading, shuffling, packing and feature
converters. They lack the guarantees of pipeline.build's caches; `consequences` warns about that.
"""

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tasks import registry
from tasks.objectives import Lengths
from tasks.terminal import extras
from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import T5_IDS, SpecialIds
from trainer.annexes.seqio_tasks.seqio_examples import examples_of, unmeasured
from trainer.config import Config
from trainer.data import task_record
from trainer.data.batches import pad_rows
from trainer.data.cached_task import CachedTask
from trainer.data.examples import ExampleSet
from trainer.data.features import Batch, Converter
from trainer.data.run import DataVocabulary, EvaluationSet, Opened, Waiting
from trainer.data.startup import packing, skip_lines
from trainer.monitoring import activity

_LIMITS = (
    "seqio makes these batches: their order depends on the versions of seqio and TensorFlow and on "
    "a shuffle buffer, a restart reads from the beginning and skips the batches already used, and "
    "nothing can name documents"
)


def open_data(config: Config) -> Opened:
    """Opens the Task or Mixture of `--task=seqio:NAME`; raises UserError if the model cannot."""
    if config.data.shuffle == "block":
        raise UserError(f"--data.shuffle=block has no effect on --task={config.task}")
    if not config.model.has_decoder:
        raise UserError(
            f"--task={config.task}: encoder-only models train on caches of pipeline.build only; "
            "choose one of the masked_lm tasks"
        )
    if config.model.start_id:
        raise UserError(
            f"--task={config.task}: seqio's decoder inputs begin with id 0, but this model's with "
            f"id {config.model.start_id} (--model.start_id): build a cache with pipeline.build"
        )
    if config.model.unpackable and config.data.pack:
        raise UserError(
            f"{config.model.unpackable} needs rows of one example: set --data.pack=false"
        )
    name = config.task.partition(":")[2]
    data = SeqioData(config, name)
    vocabulary = DataVocabulary(
        "vocabulary of the task",
        f"the vocabulary of {config.task}",
        data.vocab_size,
        data.model_sha256,
        data.extra_ids,
        data.special,
    )

    # Opened again: data depend on the batch size, which the fit may imply.
    def again(config: Config, _: Converter) -> Any:
        return SeqioData(config, name)

    return Opened(config, vocabulary, data.lengths, again)


def _record(task: Any) -> dict[str, Any]:
    """Returns the names and settings, not code, that seqio exposes for a task, as JSON values."""
    return {
        "source": type(task.source).__qualname__,
        "preprocessors": [_preprocessor(step) for step in task.preprocessors],
        "features": {
            name: {
                "vocab_size": int(feature.vocabulary.vocab_size),
                "add_eos": bool(feature.add_eos),
                "dtype": str(getattr(feature.dtype, "name", feature.dtype)),
            }
            for name, feature in task.output_features.items()
        },
    }


def _preprocessor(step: Any) -> Any:
    """Returns a preprocessor's name and, for a functools.partial, its arguments."""
    if not isinstance(step, functools.partial):
        return getattr(step, "__qualname__", type(step).__qualname__)
    arguments = {name: task_record.plain(value) for name, value in step.keywords.items()}
    return {"function": _preprocessor(step.func), "args": task_record.plain(step.args), **arguments}


class SeqioData:
    """Batches of a seqio Task or Mixture; see `trainer.data.run.Data`.

    Rows are packed as in T5X unless `data.pack` is false. They are read from the task's cache in
    `cache_dir`, if there is one and `data.use_cached` is not false. Raises a UserError if seqio,
    the task or lengths are missing.
    """

    def __init__(self, config: Config, name: str):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow only reads data here
        with extras.needed(f"--task=seqio:{name}", "seqio"):
            import seqio
            import tensorflow as tf
        tf.config.set_visible_devices([], "GPU")
        if config.task_module:
            registry.load(config.task_module)
        known = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
        if name not in known:
            raise UserError(
                f"seqio has no task or mixture {name}{nearest(name, known)}: give the module that "
                "registers it as --task_module, or name one of our tasks in --task"
            )
        self._config, self.name, self._seqio = config, name, seqio
        self.tasks: Sequence[CachedTask] = ()
        self._mixture = seqio.get_mixture_or_task(name)
        features = self._mixture.output_features
        for side in ("inputs", "targets"):
            if side in features and getattr(config.lengths, side) is None:
                raise UserError(f"--task=seqio:{name} needs --lengths.{side}")
        if "targets" not in features:
            raise UserError(f"seqio:{name} has no feature targets, only {', '.join(features)}")
        self.lengths = Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)
        vocabulary = features["targets"].vocabulary
        self.vocab_size = int(vocabulary.vocab_size)
        self.extra_ids = int(vocabulary.extra_ids)
        # Only SentencePiece vocabularies have a model.
        model = getattr(vocabulary, "sp_model", None)
        self.model_sha256 = model and hashlib.sha256(model).hexdigest()
        # Special ids for the model; seqio itself pads with 0.
        self.special = special_of(vocabulary)
        lengths = dataclasses.asdict(self.lengths)
        self._feature_lengths = {side: lengths[side] for side in lengths if side in features}
        by_length = {} if self.special.zero_pads else {"padding": "lengths"}
        self.tasks_record = {task.name: _record(task) | by_length for task in self._tasks()}
        # seqio's caches record neither a fingerprint nor their vocabulary.
        self.fingerprints: dict[str, str] = {}
        self.vocabulary_sha256 = None
        self._cached = False
        if config.cache_dir and config.data.use_cached is not False:
            seqio.add_global_cache_dirs([config.cache_dir])
            self._cached = all(task.cache_dir for task in self._tasks())

    def keep_vocabulary(self, folder: str) -> dict[str, Any]:
        return {}  # stock seqio vocabularies are named in the user's tasks

    @property
    def record(self) -> dict[str, Any]:
        rate_of = getattr(self._mixture, "get_rate", lambda _: 1.0)
        rates = [[task.name, float(rate_of(task))] for task in self._tasks()]
        return {"tasks": self.tasks_record, "rates": [[0, rates]]}

    def _tasks(self) -> list[Any]:
        return list(getattr(self._mixture, "tasks", [self._mixture]))

    def training(
        self, first_step: int, host: int = 0, hosts: int = 1, waiting: Waiting | None = None
    ) -> Iterator[Batch]:
        # Every host reads whole batches, so that they equal a single host's.
        shuffle = self._config.data.shuffle != "none"
        dataset = self._dataset("train", shuffle=shuffle, num_epochs=None)
        skips = self._config.data.skips
        passed = skips.batch(first_step)
        batches = dataset.batch(self._config.batch_size, drop_remainder=True).skip(passed)
        size = self._config.batch_size // hosts
        part = slice(host * size, (host + 1) * size)
        made = batches.prefetch(self._config.data.prefetch).as_numpy_iterator()
        for number in itertools.count(passed + 1):
            with activity.doing(activity.DATA, f"waiting for batch {number} of {self.name}"):
                batch = next(made, None)
            if batch is None:
                return
            if not any(first <= number < following for first, following in skips.ranges):
                yield {name: array[part] for name, array in self._ids(batch).items()}

    def close(self) -> None:
        """Does nothing."""

    def evaluation(self, split: str, batch_size: int) -> list[EvaluationSet]:
        if split not in self._mixture.splits:
            advice = ": --evaluation.every_steps=0 trains without" if split == "validation" else ""
            raise UserError(f"seqio:{self.name} has no split {split}{advice}")

        def iterate() -> Iterator[Batch]:
            dataset = self._dataset(split, shuffle=False, num_epochs=1)
            for batch in dataset.batch(batch_size).as_numpy_iterator():
                yield pad_rows(self._ids(batch), batch_size)

        return [EvaluationSet(self.name, None, iterate)]

    def consequences(
        self, first_step: int = 0, host: int = 0, hosts: int = 1
    ) -> list[tuple[str, str]]:
        source = "its cache" if self._cached else "not cached: tokenized by this process"
        packed = "packed" if self._config.data.pack else "one example a row"
        if not self.special.zero_pads:
            packed += ", padding identified by lengths, because id 0 is a piece"
        warnings = [_LIMITS, *self._uncached(), *self._colliding(), *self._unmeasured()]
        lengths = f"inputs {self.lengths.inputs}, targets {self.lengths.targets}"
        return [
            ("task", f"seqio:{self.name}, {source}, {lengths}, {packed}"),
            *(("warning", text) for text in warnings),
            *skip_lines(self._config.data),
            ("batch", f"{self._config.batch_size} rows"),
            ("packing", packing(next(self.training(0)))),
        ]

    def _uncached(self) -> list[str]:
        if self._cached or not self._config.data.use_cached:
            return []
        uncacheable = [task.name for task in self._tasks() if not task.supports_caching]
        why = f"{', '.join(uncacheable)} cannot be cached" if uncacheable else "cache_dir has none"
        return [
            f"data.use_cached requests a cache, but {why}: this process tokenizes the text; "
            "pipeline.build caches the corpora of our own tasks"
        ]

    def _colliding(self) -> list[str]:
        """Returns a warning if sentinel ids are also pieces of text."""
        vocabulary = self._mixture.output_features["targets"].vocabulary
        if not self.model_sha256 or self.extra_ids:
            return []
        last = vocabulary.tokenizer.IdToPiece(self.vocab_size - 1)
        warning = (
            f"the vocabulary has no sentinels (extra_ids is 0, and its last piece is {last!r}): an "
            "objective with sentinels would use pieces of text instead"
        )
        return [] if "extra_id_" in last else [warning]

    def _unmeasured(self) -> list[str]:
        names = {name for task in self._tasks() for name in unmeasured(task)}
        warning = (
            f"metric_objs of the task ({', '.join(sorted(names))}) are not computed: they read "
            "model outputs other than generated ids and scores"
        )
        return [warning] if names else []

    def encode(self, text: str) -> list[int]:
        return list(self._mixture.output_features["targets"].vocabulary.encode(text))

    def examples(self, split: str) -> list[ExampleSet]:
        # Unpacked, as in seqio's Evaluator.
        return [
            examples_of(task, split, self._feature_lengths, self._cached, self._config)
            for task in self._tasks()
            if split in task.splits
        ]

    def _ids(self, batch: Batch) -> Batch:
        if self.special.zero_pads:
            return batch
        return ids_of(batch, self.special.start)

    def _dataset(self, split: str, shuffle: bool, num_epochs: int | None) -> Any:
        seqio, model, pack = self._seqio, self._config.model, self._config.data.pack
        if model.num_encoder_layers > 0:
            kind = seqio.EncDecFeatureConverter
        elif "inputs" in self._feature_lengths:
            kind = seqio.PrefixLMFeatureConverter
        else:
            kind = seqio.LMFeatureConverter
        if not self.special.zero_pads:
            kind = shifting(kind)
        return seqio.get_dataset(
            self.name,
            task_feature_lengths=self._feature_lengths,
            dataset_split=split,
            shuffle=shuffle,
            num_epochs=num_epochs,
            feature_converter=kind(pack=pack),
            use_cached=self._cached,
            seed=self._config.seed,
        )


# With a vocabulary whose id 0 is a piece, seqio would take every 0 for padding: in loss weights,
# segment ids and positions of packed examples. So its feature converters get every id plus 1, and
# `ids_of` subtracts it again. Only segment ids then mark tokens.
_SIDES = ("inputs", "targets")


def special_of(vocabulary: Any) -> SpecialIds:
    """Returns a seqio.Vocabulary's special ids; T5's if id 0 pads rows."""
    zero_pads = getattr(vocabulary, "zero_pads", None)
    pad = None
    if zero_pads is None:
        pad_id = getattr(getattr(vocabulary, "tokenizer", None), "pad_id", None)
        pad = pad_id() if pad_id else 0
        zero_pads = pad == 0
    if zero_pads:
        return T5_IDS
    optional = (pad, vocabulary.unk_id, vocabulary.bos_id)
    pad, unk, bos = (None if number is None or number < 0 else int(number) for number in optional)
    return SpecialIds(pad, int(vocabulary.eos_id), unk, bos)


def shifting(converter: type) -> type:
    """Returns a subclass of one of seqio's feature converters whose features are ids plus 1."""

    class Shifting(converter):
        def _convert_features(self, ds: Any, task_feature_lengths: Any) -> Any:
            def up(row: dict[str, Any]) -> dict[str, Any]:
                return {name: row[name] + 1 if name in _SIDES else row[name] for name in row}

            return super()._convert_features(ds.map(up), task_feature_lengths)

    return Shifting


def ids_of(batch: Batch, start: int) -> Batch:
    """Returns a `shifting` converter's batch with its ids and segment ids."""
    found = dict(batch)
    for name, tokens_WL in batch.items():
        if name.endswith("_tokens"):
            found[name] = np.maximum(tokens_WL - 1, 0)
    for side, name in (("encoder", "encoder_input_tokens"), ("decoder", "decoder_target_tokens")):
        if name in batch:
            is_token_WL = (batch[name] > 0).astype(np.int32)
            found.setdefault(f"{side}_segment_ids", is_token_WL)
    segments_WL = found["decoder_segment_ids"]
    begins_WL = np.diff(segments_WL, axis=1, prepend=0) != 0
    begins_WL[:, 0] = True
    found["decoder_input_tokens"][begins_WL & (segments_WL > 0)] = start
    return found
