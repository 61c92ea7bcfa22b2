"""Finds checkpoints to convert, their models and their parameters."""

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from tasks import annexes
from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer import huggingface
from trainer.checkpoints import layout, stored
from trainer.checkpoints.layout import Parts
from trainer.checkpoints.stored import NO_STEP, Checkpoint
from trainer.checkpoints.tensors import held
from trainer.config import Config, field_paths, from_flags, stored_config, stored_model
from trainer.config.presets import model_preset
from trainer.data import features
from trainer.exporting.folder import Model
from trainer.exporting.record import recorded
from trainer.huggingface import weights
from trainer.initialization import init_from
from trainer.model.config import ModelConfig
from trainer.model.paths import named

FLAG = "--from"
_EMBEDDING = "token_embedder/embedding"


class Source(NamedTuple):
    """A checkpoint: its folder or Mesh TensorFlow's prefix, and the step in its name, or 0."""

    path: str
    step: int
    transformers: bool


class ModelFiles(Protocol):
    """Files of another program that describe a model: a group of flags, from an annex."""

    FLAG: ClassVar[str]
    BESIDE: ClassVar[tuple[str, ...]]  # the names that they may have beside checkpoints

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the flags name."""

    def model(self, files: Sequence[str]) -> ModelConfig:
        """Returns the model that files describe."""


def model_files() -> tuple[ModelFiles, ...]:
    """Returns all kinds of files that describe models, with no flags set."""
    return tuple(kind() for kind in annexes.every("model_flags"))


@dataclasses.dataclass(frozen=True)
class Given:
    """The command line's choice of model; `overrides` are `--model.FIELD=value` flags."""

    preset: str | None = None
    overrides: tuple[str, ...] = ()
    described: tuple[ModelFiles, ...] = dataclasses.field(default_factory=model_files)

    @property
    def flags(self) -> list[str]:
        """The flags that name the model."""
        preset = ["--preset"] if self.preset else []
        return preset + [each.FLAG for each in self.described if each.files]


class Opened(NamedTuple):
    """A checkpoint whose names and shapes match its model."""

    source: Source
    model: Model
    parameters: dict[str, Parts]  # values and Adafactor's moments by name, layers unstacked
    checkpoint: Checkpoint | None  # None for transformers folders
    step: int


def find(path: str) -> tuple[list[Source], bool]:
    """Returns (the checkpoints at `path` by ascending step, whether it is a folder of them)."""
    if _is_of_transformers(path):
        return [Source(path, _step_of(path) or 0, True)], False
    if stored.is_checkpoint(path):
        return [Source(stored.find(path), _step_in(path.removesuffix(".index")) or 0, False)], False
    if inside := stored.checkpoints(path):
        return [Source(each, step, False) for step, each in inside.items()], True
    below = [] if files.is_remote(path) else sorted(files.list_names(path))
    found: dict[int, Source] = {}
    for folder in [files.join(path, name) for name in below if not name.startswith(".")]:
        step = _step_of(folder)
        if not _is_of_transformers(folder):
            if step is not None and files.exists(files.join(folder, weights.WEIGHTS)):
                raise UserError(
                    f"{folder} has {weights.WEIGHTS} but no {huggingface.CONFIG} that names a model"
                )
            continue
        if step is None:
            raise UserError(
                f"{FLAG}={path}: the name of {folder} does not end with a step (checkpoint_1000); "
                "convert it alone, or rename it"
            )
        if step in found:
            raise UserError(f"{FLAG}={path}: {found[step].path} and {folder} have the same step")
        found[step] = Source(folder, step, True)
    if not found:
        raise UserError(
            f"{FLAG}={path} holds no checkpoint of transformers (config.json), of T5X or this "
            "trainer (checkpoint_STEP), or of Mesh TensorFlow (model.ckpt-STEP.index)"
        )
    return [found[step] for step in sorted(found)], True


def _is_of_transformers(path: str) -> bool:
    where = files.join(path, huggingface.CONFIG)
    if files.is_remote(path) or not os.path.isfile(files.local_path(where)):
        return False
    try:
        written = files.read_json(where)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON: {error}") from error
    return isinstance(written, dict) and "model_type" in written


def _step_of(path: str) -> int | None:
    """Returns the step of a transformers folder: its record's, else the one in its name."""
    record = {} if files.is_remote(path) else recorded(path) or {}
    return record.get("step", _step_in(path))


def _step_in(path: str) -> int | None:
    # Other trailing digits belong to the model's name: mt5, bert-2.
    pattern = r"(?:.*(?:checkpoint|ckpt|step)[-_]?|.*_)?(\d+)"
    found = re.fullmatch(pattern, path.rstrip("/").rpartition("/")[2])
    return int(found[1]) if found else None


def opened(source: Source, given: Given) -> Opened:
    """Opens a checkpoint and checks it against its model; only transformers' arrays are read."""
    flag = f"{FLAG}={source.path}"
    if source.transformers:
        _refuse_given(flag, given, "its config.json describes the model")
        config = huggingface.model_config(source.path)
        tree = huggingface.load(source.path, config)
        found = {name: {"value": held(array)} for name, array in named(tree).items()}
        ids = huggingface.special_ids_of(source.path)
        model = Model(config, source.path, _positions_of(source.path, config), ids)
        return Opened(source, model, found, None, source.step)
    checkpoint = stored.load(source.path)
    found = layout.read_parts(checkpoint)
    ids = (recorded(source.path) or {}).get("ids", {})
    model = _model_of(source, checkpoint, given, found)._replace(ids=ids)
    scanned = any(map(layout.is_stacked, checkpoint.parameters))
    found = init_from.fitted(flag, found, model.config, 0, scanned)
    step = source.step if checkpoint.step == NO_STEP else checkpoint.step
    return Opened(source, model, found, checkpoint, step)


def _refuse_given(flag: str, given: Given, reason: str) -> None:
    if set_ones := [*given.flags, *given.overrides]:
        raise UserError(f"{set_ones[0]} has no effect on {flag}: {reason}")


def _positions_of(path: str, config: ModelConfig) -> int:
    written = files.read_json(files.join(path, huggingface.CONFIG))
    return int(written.get("max_position_embeddings") or config.max_positions)


def _model_of(
    source: Source, checkpoint: Checkpoint, given: Given, found: dict[str, Parts]
) -> Model:
    flag = f"{FLAG}={source.path}"
    if checkpoint.run is not None:
        _refuse_given(flag, given, "the checkpoint describes its model")
        trained = stored_config(checkpoint.run["config"], source.path)
        positions = features.longest_row(trained)
        own = _unscanned(trained.model)
        return Model(own, trained.preset, positions or own.max_positions)
    record = recorded(source.path)
    if record and not given.flags:
        config = stored_model(record["model"], source.path)
        model = Model(config, record["name"], record["positions"])
    else:
        model = _given_model(source, given)
    config = field_paths.override(
        Config(model.name, model.config), {}, from_flags.given(given.overrides)
    ).model
    rows = {parts["value"].shape[0] for name, parts in found.items() if name.endswith(_EMBEDDING)}
    if len(rows) == 1:
        # The number of ids depends on the run's vocabulary, not on the model's files.
        config = dataclasses.replace(config, vocab_size=rows.pop())
    return model._replace(config=_unscanned(config))


def _given_model(source: Source, given: Given) -> Model:
    if len(given.flags) > 1:
        raise UserError(f"{' and '.join(given.flags)} both name the model: omit one of them")
    if given.preset:
        config = model_preset(given.preset)
        return Model(config, given.preset, config.max_positions)
    for each in given.described:
        if found := each.files or _beside(source.path, each.BESIDE):
            config = each.model(found)
            return Model(config, "+".join(map(os.path.basename, found)), config.max_positions)
    names = [name for each in given.described for name in each.BESIDE]
    reason = f" (there is neither {' nor '.join(names)} beside it)" if names else ""
    flags = "".join(f", or with {each.FLAG}" for each in given.described)
    raise UserError(
        f"{FLAG}={source.path} does not say which model it has{reason}: name the model with "
        f"--preset, such as --preset=t5_1_1_base{flags}"
    )


def _beside(path: str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the first of some files that is in a checkpoint's folder, or beside it."""
    folders = (path, path.rstrip("/").rpartition("/")[0] or ".")
    places = [files.join(folder, name) for folder in folders for name in names]
    return tuple(place for place in places if files.exists(place))[:1]


def _unscanned(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, scan_layers=False)
