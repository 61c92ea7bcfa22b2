"""The configuration of a run: frozen typed dataclasses, and where each value came from.

A preset < what the task and the cache imply < `--field.path=value`. Every field keeps its origin.
No heavy import: `python -m trainer.pretrain --help` needs none.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterator
from typing import Any

from tasks import files
from tasks.command_line import UserError, nearest
from trainer.loss import LossConfig
from trainer.model.spec import ModelConfig
from trainer.optimizer import OptimizerConfig

CONFIG_FILE = "config.json"


@dataclasses.dataclass(frozen=True)
class LengthsConfig:
    """Positions of an example's features, EOS included. None: the task's own."""

    inputs: int | None = None
    targets: int | None = None


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every so many steps, and at the last; the newest `keep` stay (None: all)."""

    every_steps: int = 1000
    keep: int | None = 3


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the whole validation split every so many steps, and at the last; 0: never.

    `batch_size` None is the training batch's; the result does not depend on it.
    """

    every_steps: int = 1000
    batch_size: int | None = None


@dataclasses.dataclass(frozen=True)
class MetricsConfig:
    """Training metrics, summed over so many steps, go to JSON lines and TensorBoard."""

    every_steps: int = 100
    tensorboard: bool = True


@dataclasses.dataclass(frozen=True)
class Config:
    """A run. `model_dir` is where it writes; `cache_dir` what pipeline.build wrote.

    `batch_size` counts rows of the global batch. `seed` determines initial parameters, dropout,
    the order of windows and their noise.
    """

    preset: str
    model: ModelConfig
    task: str = ""
    task_module: str | None = None
    cache_dir: str = ""
    model_dir: str = ""
    train_steps: int = 10_000
    batch_size: int = 128
    seed: int = 0
    lengths: LengthsConfig = LengthsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()


# What may differ between a checkpoint's run and the one that resumes it: nothing that changes a
# parameter of an earlier step.
RESUMABLE_CHANGES = (
    "preset",
    "cache_dir",
    "model_dir",
    "task_module",
    "train_steps",
    "checkpoint.",
    "evaluation.",
    "metrics.",
)


def leaves(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (field path, value) of every field that is not itself a dataclass."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        inner = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(value):
            yield from leaves(value, inner)
        else:
            yield inner, value


def replace(config: Any, path: str, value: Any) -> Any:
    """Returns a copy of `config` with the field at `path` set.

    Raises:
      UserError: the dataclass refuses the value.
    """
    name, _, rest = path.partition(".")
    try:
        new = replace(getattr(config, name), rest, value) if rest else value
        return dataclasses.replace(config, **{name: new})
    except ValueError as error:
        raise UserError(str(error)) from error


def field_type(config: Any, path: str) -> Any:
    """Returns the declared type of the field at `path`."""
    name, _, rest = path.partition(".")
    if rest:
        return field_type(getattr(config, name), rest)
    return typing.get_type_hints(type(config))[name]


def parse_value(text: str, declared: Any) -> Any:
    """Reads `text` as a value of a declared field type.

    Raises:
      ValueError: it is none.
    """
    choices = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        if text in ("None", "none", "null"):
            return None
        return parse_value(text, next(kind for kind in choices if kind is not type(None)))
    if typing.get_origin(declared) is tuple:
        return tuple(parse_value(part.strip(), choices[0]) for part in text.split(",") if part)
    if declared is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError("neither true nor false")
        return text.lower() == "true"
    return declared(text)


def override(config: Config, origins: dict[str, str], arguments: list[str]) -> Config:
    """Applies `--field.path=value` (or `--field.path value`) and notes the origins.

    Raises:
      UserError: an unknown field, or a value of the wrong type.
    """
    known = {path for path, _ in leaves(config)}
    pending = list(arguments)
    while pending:
        flag = pending.pop(0)
        path, equals, text = flag.removeprefix("--").partition("=")
        path = path.replace("-", "_")
        if not flag.startswith("--") or path not in known:
            raise UserError(f"unknown flag {flag.split('=')[0]}{nearest(path, known)}")
        if not equals:
            if not pending:
                raise UserError(f"--{path} needs a value")
            text = pending.pop(0)
        declared = field_type(config, path)
        try:
            value = parse_value(text, declared)
        except ValueError as error:
            name = getattr(declared, "__name__", str(declared))
            raise UserError(f"--{path}={text}: not a value of type {name}") from error
        config = replace(config, path, value)
        origins[path] = "command line"
    return config


def describe(config: Config, origins: dict[str, str]) -> str:
    """One line a field: its path, value and origin."""
    rows = [
        (path, json.dumps(value), origins.get(path, "default")) for path, value in leaves(config)
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(
        f"{path:<{widths[0]}} = {value:<{widths[1]}}  # {origin}" for path, value, origin in rows
    )


def save(config: Config, origins: dict[str, str]) -> None:
    """Writes config.json into the model directory."""
    value = {"config": dataclasses.asdict(config), "origins": origins}
    files.write_json(files.join(config.model_dir, CONFIG_FILE), value)


def load(model_dir: str) -> Config:
    """Reads the configuration of the run in `model_dir`.

    Raises:
      UserError: there is no run, or one of another version.
    """
    path = files.join(model_dir, CONFIG_FILE)
    if not files.exists(path):
        raise UserError(
            f"{model_dir} holds no run (there is no {CONFIG_FILE}): train one with trainer.pretrain"
        )
    return from_dict(Config, files.read_json(path)["config"], path)


def from_dict(kind: type, value: dict[str, Any], path: str) -> Any:
    """Inverse of dataclasses.asdict, tuples and nested dataclasses included."""
    hints = typing.get_type_hints(kind)
    unknown = set(value) - set(hints)
    if unknown:
        raise UserError(f"{path} has fields of another version: {', '.join(sorted(unknown))}")
    known = {}
    for name, item in value.items():
        if dataclasses.is_dataclass(hints[name]):
            item = from_dict(hints[name], item, path)
        elif isinstance(item, list):
            item = tuple(item)
        known[name] = item
    return kind(**known)


def changes(before: Config, now: Config) -> list[str]:
    """The fields, of those that determine the parameters, in which two configurations differ."""
    old = dict(leaves(before))
    return [
        f"{path} was {old.get(path)}, is {value}"
        for path, value in leaves(now)
        if old.get(path) != value and not path.startswith(RESUMABLE_CHANGES)
    ]
