"""From a configuration to the parts of a run: every check that needs no device is made here."""

import dataclasses

from tasks.objectives import Lengths
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from trainer.config import Config, fields
from trainer.config.mesh import check_dimensions
from trainer.data import features
from trainer.data.cached import CachedData, Data, mixtures_of, open_cache
from trainer.data.features import Converter

SEQIO = "seqio:"

# Rows of the embedding are a multiple of this, as T5's 32,128 for 32,100 ids: accelerators like it,
# and tensor parallelism divides it. Source: T5X `examples/t5/t5_1_1/base.gin`.
_VOCABULARY_MULTIPLE = 128
_IMPLIED_BY_TOKENS = {
    "tokens_per_batch": "batch_size",
    "tokens_per_microbatch_per_replica": "microbatches",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A checked configuration and what it refers to."""

    config: Config
    data: Data
    converter: Converter

    @property
    def lengths(self) -> Lengths:
        """Of the features."""
        return self.data.lengths


def prepare(config: Config, origins: dict[str, str]) -> Run:
    """Fills in what tasks and caches imply, and refuses what cannot work.

    Raises:
      UserError: something is missing or does not fit; says which flag to set to what.
    """
    for name in ("task", "model_dir"):
        if not getattr(config, name):
            raise UserError(f"--{name} is missing")
    for name, least in (("train_steps", 1), ("batch_size", 1), ("microbatches", 1)):
        if getattr(config, name) < least:
            raise UserError(f"--{name}={getattr(config, name)}: must be at least {least}")
    for name in ("tokens_per_batch", "tokens_per_microbatch_per_replica"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise UserError(f"--{name}={value}: must be at least 1")
    data = _seqio_data if config.task.startswith(SEQIO) else _cached_data
    return data(config, origins)


def vocabulary_sha256(data: Data) -> str | None:
    """That of the caches' vocabulary; None of a task of seqio's, whose files only it knows."""
    if not isinstance(data, CachedData):
        return None
    return data.tasks[0].manifest.plan.vocabulary.sha256


def batch_of_tokens(config: Config, origins: dict[str, str], lengths: Lengths) -> Config:
    """`batch_size` and `microbatches` of what is given in tokens.

    Source: Mesh TensorFlow, `utils.compute_batch_size` and `serialize_num_microbatches`.
    """
    length = max(lengths.inputs, lengths.targets)
    for tokens, implied in _IMPLIED_BY_TOKENS.items():
        if getattr(config, tokens) is not None and origins.get(implied) == "command line":
            raise UserError(f"--{tokens} and --{implied} are two words for one thing: set one")
    tokens_per_batch = config.tokens_per_batch
    if tokens_per_batch is not None:
        if tokens_per_batch % length:
            raise UserError(
                f"--tokens_per_batch={tokens_per_batch} does not divide into rows of {length}: "
                f"{tokens_per_batch // length * length or length} does"
            )
        config = dataclasses.replace(config, batch_size=tokens_per_batch // length)
        origins["batch_size"] = "tokens_per_batch"
    if config.tokens_per_microbatch_per_replica is not None:
        import jax

        sizes = config.mesh.sizes(jax.device_count())
        replicas = sizes["data"] * sizes["fsdp"]
        # What does not divide is refused where every batch is.
        if config.batch_size % replicas == 0:
            rows = config.batch_size // replicas
            most = max(1, min(rows, config.tokens_per_microbatch_per_replica // length))
            part = next(size for size in range(most, 0, -1) if rows % size == 0)
            config = dataclasses.replace(config, microbatches=rows // part)
        origins["microbatches"] = "tokens_per_microbatch_per_replica"
    return config


def _cached_data(config: Config, origins: dict[str, str]) -> Run:
    if not config.cache_dir:
        raise UserError("--cache_dir is missing")
    _refuse_idle(config, ("data.use_cached", "data.pack"))
    names = dict.fromkeys(name for _, spec in mixtures_of(config) for name in spec.names)
    tasks = [open_cache(config, name) for name in names]
    for each in tasks:
        _check_task(each.task, config)
        config = _imply_lengths(config, origins, each.task)
    where = f"the vocabulary of {tasks[0].cache}"
    config = _imply_vocabulary(config, origins, tasks[0].ids.size, "vocabulary of the cache", where)
    record = tasks[0].manifest.plan.vocabulary
    _check_vocabulary(config, where, record.sha256, record.extra_ids)
    lengths = Lengths(config.lengths.inputs or 0, config.lengths.targets or 0)
    converter = features.converter(config.model, lengths)
    _check_positions(config, converter)
    config = batch_of_tokens(config, origins, lengths)
    _check_mesh(config)
    return Run(config, CachedData(config, tasks, converter), converter)


def _seqio_data(config: Config, origins: dict[str, str]) -> Run:
    from trainer.data.seqio_data import SeqioData

    idle = ("mixing.", "objective", "data.local_", "data.block_", "data.threads")
    _refuse_idle(config, idle)
    if config.data.shuffle == "block":
        raise UserError(f"--data.shuffle=block has no effect on --task={config.task}")
    if config.model.architecture == "encoder":
        raise UserError(
            f"--task={config.task}: an encoder alone trains on caches of pipeline.build; choose "
            "one of the masked_lm tasks"
        )
    data = SeqioData(config, config.task.removeprefix(SEQIO))
    where = f"the vocabulary of {config.task}"
    config = _imply_vocabulary(config, origins, data.vocab_size, "vocabulary of the task", where)
    _check_vocabulary(config, where, data.vocabulary_sha256, data.extra_ids)
    converter = features.converter(config.model, data.lengths)
    _check_positions(config, converter)
    config = batch_of_tokens(config, origins, data.lengths)
    _check_mesh(config)
    # It reads as many rows as the batch has.
    return Run(config, SeqioData(config, data.name), converter)


def _refuse_idle(config: Config, idle: tuple[str, ...]) -> None:
    defaults = dict(fields.leaves(Config(config.preset, config.model)))
    for path, value in fields.leaves(config):
        if path.startswith(idle) and value != defaults[path]:
            raise UserError(f"--{path} has no effect on --task={config.task}")


def _check_task(task: TaskSpec, config: Config) -> None:
    wanted = {*task.objective.features}
    fills_encoder = config.model.architecture != "encoder_decoder" or task.lengths.inputs
    if fills_encoder and features.convertible(config.model, task.objective.features):
        return
    if "order" in wanted:
        fitting = "an encoder-only preset (bert_base, …)"
    elif task.lengths.inputs and "prefix" not in wanted:
        fitting = "an encoder-decoder or decoder-only preset (t5_1_1_small, lm_small, …)"
    else:
        fitting = "a decoder-only preset (lm_small, …)"
    made_of = ", ".join(task.objective.features)
    raise UserError(
        f"preset {config.preset} cannot train on task {task.name}, whose examples are {made_of}: "
        f"choose {fitting} or another task"
    )


def _check_mesh(config: Config) -> None:
    """What can be known without counting devices."""
    sizes, rules = config.mesh.planned(), config.mesh.rules
    check_dimensions(sizes, rules, config.model, config.batch_size, config.microbatches)


def _check_positions(config: Config, converter: Converter) -> None:
    model = config.model
    for side, length in (
        ("inputs", converter.encoder_length),
        ("targets", converter.decoder_length),
    ):
        if model.counts_positions and length > model.max_positions:
            raise UserError(
                f"--lengths.{side}={length}: the model knows {model.max_positions} positions; set "
                f"--model.max_positions={length}, or fewer {side}"
            )


def _imply_lengths(config: Config, origins: dict[str, str], task: TaskSpec) -> Config:
    for side in ("inputs", "targets"):
        field = f"lengths.{side}"
        value, set_already = getattr(task.lengths, side), getattr(config.lengths, side)
        if set_already is None:
            config = fields.replace(config, field, value)
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
    """Sets the number of embeddings, if nobody did, to what `size` ids need."""
    if origins.get("model.vocab_size", "preset").startswith("preset"):
        rounded = -(-size // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
        config = fields.replace(config, "model.vocab_size", rounded)
        origins["model.vocab_size"] = origin
    if config.model.vocab_size < size:
        raise UserError(
            f"--model.vocab_size={config.model.vocab_size} is smaller than {where}, {size} ids"
        )
    return config


def _check_vocabulary(config: Config, where: str, sha256: str | None, extra_ids: int) -> None:
    """Holds the vocabulary that a run expects against the one that it has; a remote file is not
    fetched for it."""
    expected = config.vocabulary
    if expected.extra_ids not in (None, extra_ids):
        raise UserError(
            f"--vocabulary.extra_ids={expected.extra_ids}: {where} has {extra_ids} on top of its "
            "pieces"
        )
    path = expected.model_file
    if path is None or files.is_remote(path):
        return
    if not files.exists(path):
        raise UserError(f"--vocabulary.model_file={path}: there is no such file")
    if files.sha256(path) != sha256:
        raise UserError(
            f"--vocabulary.model_file={path} is another vocabulary than {where}: name the one that "
            "the cache was built with, or build a cache with this one"
        )
