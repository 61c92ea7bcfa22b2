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
from trainer.model.config import ModelConfig

CONFIG_FILE = "config.json"

NORMALIZERS = (
    "sum",
    "num_real_target_tokens",
    "num_total_target_tokens",
    "average_per_sequence",
)
# The keys of `optimizer.FACTORS`, which holds the functions.
SCHEDULE_FACTORS = (
    "constant",
    "cosine_decay",
    "decay_every",
    "linear_decay",
    "linear_warmup",
    "rsqrt_decay",
    "rsqrt_normalized_decay",
)


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The loss in T5X's words.

    `z_loss` is the weight of log(Z)^2, which keeps the normalisers of the softmax near 1.
    `label_smoothing` is the probability spread over the wrong tokens.

    `normalizer` says what the sum over tokens is divided by: "sum" nothing (T5X's
    `loss_normalizing_factor = None`), "num_real_target_tokens" the sum of weights,
    "num_total_target_tokens" batch times length, "average_per_sequence" the number of sequences,
    each one's tokens weighing 1 together. `normalizing_constant` is a divisor of one's own, with
    "sum". Adafactor divides by the size of the gradient, so for it the choice among the first
    three changes nothing but the loss that is printed; "average_per_sequence" weighs tokens anew.

    Raises:
        ValueError: at construction, naming the field, if a value makes no sense.
    """

    z_loss: float = 1e-4
    label_smoothing: float = 0.0
    normalizer: str = "sum"
    normalizing_constant: float | None = None

    def __post_init__(self) -> None:
        if self.normalizer not in NORMALIZERS:
            known = ", ".join(repr(name) for name in NORMALIZERS)
            raise ValueError(
                f"LossConfig.normalizer is {self.normalizer!r}; it must be one of {known}"
            )
        if self.z_loss < 0:
            raise ValueError(f"LossConfig.z_loss is {self.z_loss}; it must be 0 or more")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"LossConfig.label_smoothing is {self.label_smoothing}; it must be in [0, 1)"
            )
        if self.normalizing_constant is not None:
            if self.normalizer != "sum":
                raise ValueError(
                    "LossConfig.normalizing_constant goes with normalizer 'sum', "
                    f"not with {self.normalizer!r}"
                )
            if self.normalizing_constant <= 0:
                raise ValueError(
                    f"LossConfig.normalizing_constant is {self.normalizing_constant}; "
                    "it must be above 0"
                )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Adafactor and its schedule.

    `learning_rate` is T5X's `base_learning_rate`; with `multiply_by_parameter_scale` it is
    relative to each tensor's root mean square. `schedule` is a product of the factors in
    SCHEDULE_FACTORS, written "constant * linear_warmup * rsqrt_decay". The default,
    "constant * rsqrt_decay", has no ramp: it is flat at `learning_rate / sqrt(warmup_steps)` for
    `warmup_steps`.

    `decay_rate`, `step_offset`, `clipping_threshold`, `min_dim_size_to_factor` are Adafactor's;
    `decay_factor`, `steps_per_decay` (steps) and `steps_per_cycle` (steps) serve the factors
    that name them. The schedule never gives less than `minimum_learning_rate`.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235); google-research/t5x, `adafactor.py` and
    `utils.create_learning_rate_scheduler`, whose defaults these are, but for the learning rate
    and the schedule, which are those of its pretraining runs (`configs/runs/pretrain.gin`).

    Raises:
        ValueError: at construction, naming the field or the factor, if a value makes no sense.
    """

    name: str = "adafactor"
    learning_rate: float = 1.0
    schedule: str = "constant * rsqrt_decay"
    warmup_steps: int = 10_000
    decay_rate: float = 0.8
    step_offset: int = 0
    clipping_threshold: float = 1.0
    min_dim_size_to_factor: int = 128
    multiply_by_parameter_scale: bool = True
    decay_factor: float = 0.5
    steps_per_decay: int = 20_000
    steps_per_cycle: int = 100_000
    minimum_learning_rate: float = 1e-8

    def __post_init__(self) -> None:
        if self.name != "adafactor":
            raise ValueError(f"OptimizerConfig.name is {self.name!r}; it must be 'adafactor'")
        for factor in factor_names(self.schedule):
            if factor not in SCHEDULE_FACTORS:
                raise ValueError(
                    f"OptimizerConfig.schedule {self.schedule!r} has the unknown factor "
                    f"{factor!r}; known are {', '.join(sorted(SCHEDULE_FACTORS))}, joined by '*'"
                )
        for name in ("warmup_steps", "steps_per_decay", "steps_per_cycle"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"OptimizerConfig.{name} is {getattr(self, name)}; it must be 1 or more"
                )
        if self.clipping_threshold < 1:
            raise ValueError(
                f"OptimizerConfig.clipping_threshold is {self.clipping_threshold}; "
                "it must be 1 or more"
            )


def factor_names(schedule: str) -> list[str]:
    """The factors of a schedule, in order."""
    return [name.strip() for name in schedule.split("*")]


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


def load(model_dir: str) -> tuple[Config, dict[str, str]]:
    """Reads the configuration of the run in `model_dir`, and the origins of its fields.

    Raises:
      UserError: there is no run, or one of another version.
    """
    path = files.join(model_dir, CONFIG_FILE)
    if not files.exists(path):
        raise UserError(
            f"{model_dir} holds no run (there is no {CONFIG_FILE}): train one with trainer.pretrain"
        )
    value = files.read_json(path)
    return from_dict(Config, value["config"], path), value["origins"]


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
