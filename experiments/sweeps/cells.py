"""The cells of a sweep: their runs, folders and outcomes."""

import dataclasses
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.sweeps.definition import OUTPUT, Choice, Settings, Sweep, alternative, filled
from tasks import registry
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import made, parse
from trainer.config import Config, field_paths
from trainer.config.batch_of_tokens import batch_of_tokens
from trainer.config.from_flags import RunFlags, configured
from trainer.config.optimizer import recipe
from trainer.config.phases import in_updates
from trainer.data.mixing import mixtures_of

CELLS = "cells"
RECORD = "cell.json"
FINISHED, FAILED, INTERRUPTED = "finished", "failed", "interrupted"
# Fields that determine where a run is stored, not what it computes.
_PLACES = ("model_dir", "cache_dir", "data.local_dir")
# Fields that the runner sets; in a fine-tuning also where it starts.
_OWN = ("model_dir", "seed")
_EVALUATIONS = 10
# The parameter that sets vocab.train's number of pieces, and the number of sentinels it adds.
_PIECES, _SENTINELS = "vocab_size", 100


@dataclasses.dataclass(frozen=True)
class Stage:
    """A run of trainer.pretrain or trainer.finetune; `settings` are its flags without a folder."""

    module: str
    settings: Settings
    config: Config

    @property
    def folder(self) -> str:
        """Name of the run's folder inside the cell's."""
        return "run" if self.module == "trainer.pretrain" else "then"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A combination of the axes' values with a seed."""

    values: Settings  # axis -> label
    seed: int
    stages: tuple[Stage, ...]  # its runs in order
    prepare: tuple[tuple[str, ...], ...]  # commands to run first
    vocab_size: int | None = None  # of the vocabulary that `prepare` makes, for estimates

    @property
    def label(self) -> str:
        """A readable label for the cell."""
        return ", ".join([*(f"{axis}={label}" for axis, label in self.values.items()),
                          f"seed {self.seed}"])  # fmt: skip

    @property
    def config(self) -> Config:
        """The configuration of the cell's first run."""
        return self.stages[0].config

    def commands(self, folder: str) -> list[tuple[str, ...]]:
        """Returns the commands, as words, of the runs of a cell in `folder`."""
        found = []
        for stage in self.stages:
            own = {"model_dir": files.join(folder, stage.folder)}
            if stage.module == "trainer.finetune":
                own["init_from"] = files.join(folder, self.stages[0].folder)
            flags = (f"--{name}={value}" for name, value in {**stage.settings, **own}.items())
            found.append((stage.module, *flags))
        return found

    def key(self) -> str:
        """Returns the SHA-256 of the cell's configurations and caches, which must exist."""
        stages = []
        for stage in self.stages:
            values = {
                path: value
                for path, value in field_paths.leaves(stage.config)
                if path not in _PLACES
            }
            stages.append([stage.module, values, fingerprints(stage.config)])
        return hashlib.sha256(json.dumps(stages, sort_keys=True).encode()).hexdigest()


def fingerprints(config: Config) -> dict[str, str]:
    """Returns the fingerprint of each task's cache; seqio tasks have none."""
    from trainer.data import cached_task

    if config.task.startswith("seqio:"):
        return {}
    names = dict.fromkeys(name for _, spec in mixtures_of(config) for name in spec.names)
    return {name: cached_task.opened(config, name).manifest.plan.fingerprint for name in names}


def plan(sweep: Sweep, output: str) -> list[Cell]:
    """Returns the cells of a sweep; the seeds of a combination are adjacent."""
    cells = []
    for choices in sweep.combinations():
        values = {axis.name: choice.label for axis, choice in zip(sweep.axes, choices, strict=True)}
        for seed in sweep.seeds:
            try:
                cells.append(_cell(sweep, output, choices, values, seed))
            except UserError as error:
                label = ", ".join(f"{axis}={label}" for axis, label in values.items())
                raise UserError(f"{label}: {error}" if label else str(error)) from error
    return cells


def _cell(
    sweep: Sweep, output: str, choices: Sequence[Choice], values: Settings, seed: int
) -> Cell:
    given, base = dict(sweep.parameters), dict(sweep.base)
    for choice in choices:
        for name, value in choice.settings.items():
            (given if name in sweep.parameters else base)[name] = value
            base.pop(alternative(name), None)
    parameters = {OUTPUT: output, "seed": str(seed)}
    for name, value in given.items():  # a value may name earlier parameters in braces
        parameters[name] = filled(value, parameters)
    stages = [_stage("trainer.pretrain", base, parameters, seed, {})]
    if sweep.then:
        preset = {"preset": stages[0].config.preset}
        stages.append(_stage("trainer.finetune", sweep.then, parameters, seed, preset))
    if not stages[-1].config.evaluation.every_steps:
        raise UserError("a sweep compares evaluations, so evaluation.every_steps must be above 0")
    commands = (_words(each, given, parameters) for each in sweep.prepare)
    prepare = tuple(tuple(command) for command in commands if command)
    pieces = parameters.get(_PIECES, "")
    vocab_size = int(pieces) + _SENTINELS if pieces.isdecimal() else None
    return Cell(values, seed, tuple(stages), prepare, vocab_size)


def _words(text: str, given: Settings, parameters: Settings) -> list[str]:
    """Returns the words of a command, or of the parameter {name} if that is all of `text`."""
    name = text.strip()[1:-1]
    if text.strip() == f"{{{name}}}" and name in given:
        return _words(given[name], given, parameters)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"prepare: {text}: {error}") from error
    return [filled(word, parameters) for word in words]


def _stage(
    module: str, settings: Settings, parameters: Settings, seed: int, implied: Settings
) -> Stage:
    for name in (*_OWN, "init_from") if module == "trainer.finetune" else _OWN:
        if name in settings:
            raise UserError(f"{name} is set by the sweep from seeds and --output: leave it out")
    given = {name: filled(value, parameters) for name, value in settings.items()}
    for name in given:
        if (other := alternative(name)) in given:
            raise UserError(f"{name} and {other} are alternatives: leave one of them out")
    every = max(1, in_steps(_config(module, {**implied, **given})).train_steps // _EVALUATIONS)
    given = {
        "evaluation.every_steps": str(every),
        "metrics.every_steps": str(every),
        "metrics.tensorboard": "false",
        "checkpoint.every_steps": str(2 * every),
        "checkpoint.keep": "1",
        **given,
        "seed": str(seed),
    }
    return Stage(module, given, _config(module, {**implied, **given}))


def in_steps(config: Config) -> Config:
    """Returns a configuration with its lengths filled in and sizes in tokens as rows and steps."""
    lengths = Lengths(0, 0)
    if not config.task.startswith("seqio:"):
        name = next(name for _, spec in mixtures_of(config) for name in spec.names)
        lengths = registry.get(name, config.task_module).lengths
    given = {side: value for side, value in vars(config.lengths).items() if value is not None}
    lengths = dataclasses.replace(lengths, **given)
    sides = {f"lengths.{side}": value for side, value in vars(lengths).items()}
    config = field_paths.replace_all(config, sides)
    return in_updates(batch_of_tokens(config, {}, lengths, devices=1), {})


def rate(config: Config) -> str:
    """Returns a description of a configuration's learning rate."""
    from trainer.optim.schedule import described

    config = in_steps(config)
    return described(config.optimizer, config.train_steps)


def _config(module: str, settings: Settings) -> Config:
    flags = made(
        RunFlags, parse(RunFlags, [f"--{name}={value}" for name, value in settings.items()])
    )
    if module == "trainer.finetune":
        chosen = flags.optimizer_preset or "t5x_finetune"
        recipe(chosen)
        flags = dataclasses.replace(flags, optimizer_preset=chosen)
    return configured(flags)[0]


def folder_of(cell: Cell, key: str) -> str:
    """Returns a cell's folder in the sweep's folder: readable, and unique because of its key."""
    words = "_".join([*cell.values.values(), f"seed_{cell.seed}"])
    return f"{CELLS}/{re.sub(r'[^A-Za-z0-9.+_-]+', '-', words)[-80:]}-{key[:8]}"


def load_record(folder: str, key: str) -> Mapping[str, Any]:
    """Returns a cell's outcome, {"status", "why"} and settings; {} for an unfinished cell."""
    path = files.join(folder, RECORD)
    if not files.exists(path):
        return {}
    value = files.read_json(path)
    if not isinstance(value, dict):
        raise UserError(f"{path} is not the record of a cell: delete {folder}")
    return value if value.get("key") == key else {}


def save_record(folder: str, cell: Cell, key: str, status: str, why: str = "") -> None:
    """Records the outcome of a cell."""
    commands = [shlex.join(command) for command in cell.commands(folder)]
    files.write_json(
        files.join(folder, RECORD),
        {"key": key, "label": cell.label, "status": status, "why": why, "commands": commands},
    )
