"""Turns a configuration into a run: opens its data and makes every check that needs no device."""

from tasks import annexes
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from trainer.checkpoints import metadata
from trainer.config import CONFIG_FILE, Config, field_paths, load_config
from trainer.config.batch_of_tokens import batch_of_tokens
from trainer.config.mesh import check_dimensions
from trainer.config.phases import in_updates
from trainer.data import features
from trainer.data.cached import CachedData
from trainer.data.caches import caches_of
from trainer.data.features import Converter
from trainer.data.mixing import mixtures_of
from trainer.data.run import Data, DataVocabulary, Opened, Run
from trainer.model.part_facts import ARCHITECTURES

# Embedding rows are rounded up to a multiple of this, like T5's 32,128 for 32,100 ids: such sizes
# are fast on accelerators and divide among devices.
# Source: T5X `examples/t5/t5_1_1/base.gin`.
VOCABULARY_MULTIPLE = 128


def prepare(config: Config, origins: dict[str, str], training: bool = False) -> Run:
    """Opens a run's data, fills in the fields that it implies, and checks all fields.

    Adds origins of implied fields to `origins`. If `training`, waits for caches being built.
    """
    if not config.model_dir:
        raise UserError("--task is missing" if not config.task else "--model_dir is missing")
    metadata.check_folder(config.model_dir, "--model_dir")
    return opened(config, origins, training)


def opened(config: Config, origins: dict[str, str], training: bool = False) -> Run:
    """Does what `prepare` does, also without a folder for the run."""
    if not config.task:
        raise UserError("--task is missing")
    if scheme := config.data_scheme:
        open_data = annexes.get("data", scheme)
        if open_data is None:
            known = ", ".join(f"{entry}:" for entry in annexes.entries("data")) or "none"
            raise UserError(f"--task={config.task}: no data are called {scheme}: (known: {known})")
        found = open_data(config)
    else:
        found = _open_caches(config, origins, training)
    config, converter = _fit(found.config, origins, found.vocabulary, found.lengths)
    return Run(config, found.data(config, converter), converter)


def _open_caches(config: Config, origins: dict[str, str], training: bool) -> Opened:
    if not config.cache_dir:
        raise UserError("--cache_dir is missing")
    _check_packing(config)
    mixtures = [spec for _, spec in mixtures_of(config)]
    caches = caches_of(config)
    caches.check(mixtures)
    names = dict.fromkeys(name for spec in mixtures for name in spec.names)
    tasks = [caches.open(name, patient=training) for name in names]
    for cached in tasks:
        check_task(cached.task, config)
        config = _imply_lengths(config, origins, cached.task)
    record, ids = tasks[0].manifest.plan.vocabulary, tasks[0].ids
    vocabulary = DataVocabulary(
        "vocabulary of the cache",
        f"the vocabulary of {tasks[0].cache}",
        ids.size,
        record.sha256,
        record.extra_ids,
        record.special_ids,
        ids if ids.model else None,
    )
    lengths = Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)

    def data(config: Config, converter: Converter) -> Data:
        return CachedData(config, tasks, converter, training)

    return Opened(config, vocabulary, lengths, data)


def _fit(
    config: Config, origins: dict[str, str], vocabulary: DataVocabulary, lengths: Lengths
) -> tuple[Config, Converter]:
    """Fits model and batch to the data; returns the completed configuration and the converter."""
    config = _imply_vocab_size(config, origins, vocabulary)
    _check_vocabulary(config, vocabulary)
    if config.model.family_facts.skips_zero and not vocabulary.special.zero_pads:
        raise UserError(
            f"id 0 is a piece of {vocabulary.place}, and the convolutions of family "
            f"{config.model.family} skip id 0 as the beginning of a text: choose another "
            "--preset, or a vocabulary whose padding is id 0"
        )
    converter = features.converter(config.model, lengths, vocabulary.special)
    config = batch_of_tokens(config, origins, lengths)
    config = in_updates(config, origins)
    for phase in config.phases.stages:
        own = features.converter(config.model, phase.lengths, vocabulary.special)
        check_positions(config, own)
    config = _imply_new_tokens(config, origins, lengths)
    # Program checks the mesh sizes that depend on the number of devices.
    sizes, rules = config.mesh.planned(), config.mesh.rules
    check_dimensions(sizes, rules, config.model, config.phases.sizes, config.microbatches)
    return config, converter


def _imply_new_tokens(config: Config, origins: dict[str, str], lengths: Lengths) -> Config:
    path = "evaluation.decoding.max_new_tokens"
    if origins.get(path, "lengths.targets") != "lengths.targets" or not lengths.targets:
        return config
    return field_paths.implied(config, origins, {path: lengths.targets}, "lengths.targets")


def _check_packing(config: Config) -> None:
    segments, packs = config.data.segment_documents, config.data.pack_examples
    if segments and packs:
        raise UserError(
            "--data.pack_examples makes each example a segment: leave out --data.segment_documents"
        )
    if packs and not config.model.has_decoder:
        raise UserError("--data.pack_examples is for models with a decoder: leave it out")
    if (segments or packs) and config.model.unpackable:
        flag = "segment_documents" if segments else "pack_examples"
        raise UserError(
            f"{config.model.unpackable} needs rows of one example: leave out --data.{flag}"
        )


def check_task(task: TaskSpec, config: Config) -> None:
    """Raises UserError if the model cannot train on the examples of a task."""
    if features.convertible(config.model, task.objective):
        return
    fitting = " or ".join(ARCHITECTURES[name].presets for name in task.objective.architectures)
    raise UserError(
        f"{config.preset} cannot train on task {task.name}, whose examples consist of "
        f"{', '.join(task.objective.features)}: choose {fitting} or another task"
    )


def check_positions(config: Config, converter: Converter) -> None:
    """Raises UserError for rows longer than the table of positions, or too short to drop tokens."""
    model = config.model
    if idle := model.idle_on(converter.encoder_length):
        raise UserError(idle)
    if not model.counts_positions:
        return
    inputs = converter.encoder_length + model.lengthening
    lengths = {"inputs": inputs, "targets": converter.decoder_length}
    for side, length in lengths.items():
        if length > model.max_positions:
            raise UserError(
                f"--lengths.{side}: rows have {length} positions, the model has "
                f"{model.max_positions}; set --model.max_positions={length} or shorten the {side}"
            )


def _imply_lengths(config: Config, origins: dict[str, str], task: TaskSpec) -> Config:
    """Sets missing lengths to the task's own; all tasks must agree on them."""
    for side in ("inputs", "targets"):
        field = f"lengths.{side}"
        value, set_already = getattr(task.lengths, side), getattr(config.lengths, side)
        if set_already is None:
            config = field_paths.implied(config, origins, {field: value}, f"task {task.name}")
        elif origins.get(field, "").startswith("task ") and set_already != value:
            raise UserError(
                f"{origins[field]} has {side} of length {set_already} and {task.name} of length "
                f"{value}: set --{field}"
            )
    return config


def _imply_vocab_size(
    config: Config, origins: dict[str, str], vocabulary: DataVocabulary
) -> Config:
    """Sets the number of embeddings to the vocabulary's size, rounded up, unless it was set."""
    origin = origins.get("model.vocab_size", "preset")
    of_source = origin in (config.init_from, f"the run {config.init_from}")
    others = of_source and _has_other_rows(config, vocabulary)
    values: dict[str, int | None] = {}
    if others and origins.get("model.start_id") == origin:
        values["model.start_id"] = None
    if origin.startswith("preset") or others:
        multiples = -(-vocabulary.size // VOCABULARY_MULTIPLE)
        values["model.vocab_size"] = multiples * VOCABULARY_MULTIPLE
    config = field_paths.implied(config, origins, values, vocabulary.origin)
    if config.model.vocab_size < vocabulary.size:
        raise UserError(
            f"--model.vocab_size={config.model.vocab_size} is smaller than {vocabulary.place}, "
            f"which has {vocabulary.size} ids"
        )
    return config


def _has_other_rows(config: Config, vocabulary: DataVocabulary) -> bool:
    path = files.join(config.model_dir, CONFIG_FILE)
    if files.exists(path):  # the run has started and no longer needs --init_from
        return load_config(config.model_dir)[0].model.vocab_size != config.model.vocab_size
    others = annexes.every("starting_vocabularies")
    return any(each.has_other_rows(config, vocabulary.ids) for each in others)


def _check_vocabulary(config: Config, vocabulary: DataVocabulary) -> None:
    """Checks the data's vocabulary against --vocabulary; does not download a remote model file."""
    expected = config.vocabulary
    if expected.extra_ids not in (None, vocabulary.extra_ids):
        raise UserError(
            f"--vocabulary.extra_ids={expected.extra_ids}: {vocabulary.place} has "
            f"{vocabulary.extra_ids} besides its pieces: set "
            f"--vocabulary.extra_ids={vocabulary.extra_ids} to train with it, or build a cache "
            f"with --extra_ids={expected.extra_ids}"
        )
    path = expected.model_file
    if path is None or files.is_remote(path):
        return
    if not files.exists(path):
        raise UserError(f"--vocabulary.model_file={path}: no such file")
    if files.sha256(path) != vocabulary.sha256:
        raise UserError(
            f"--vocabulary.model_file={path} differs from {vocabulary.place}: name the file that "
            "the cache was built with, or build a cache with this one"
        )
