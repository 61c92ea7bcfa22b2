"""Checks the runs of a recipe in their full size, as far as no device is needed."""

import contextlib
import importlib
import io
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from palimpsest.annexes.recipes import planning, stage_state
from palimpsest.annexes.recipes.derived_flags import MAY_BE_NAMED, RUNS
from palimpsest.annexes.recipes.recipe import Recipe, Stage
from palimpsest.commands import COMMANDS, command
from tasks import registry
from tasks.metrics import metric
from tasks.storage import files
from tasks.task import OBJECTIVES
from tasks.terminal import extras
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flags import given_flags, made, parse
from trainer.config import (
    CONFIG_FILE,
    Config,
    field_paths,
    from_transformers,
    load_config,
    resuming,
)
from trainer.config.evaluation import TASK_METRICS
from trainer.config.from_flags import OpenRunFlags, configured
from trainer.config.mesh import check_dimensions

_START = "init_from"
_GIVE_MODELS = ("--preset=", "--gin_file=", f"--{_START}=")


def checked(recipe: Recipe) -> dict[str, Config | None]:
    """Returns the configuration of each run; None if it has the model of a run elsewhere.

    Raises UserError for a model, mesh, batch, metric, checkpoint, runner or export that cannot
    work.
    """
    found: dict[str, Config | None] = {}
    for stage in recipe.stages:
        with named(stage):
            if "runner" in stage.flags:
                _check_runner(stage)
            if stage.kind == "cache":
                _check_task(stage)
            if stage.kind in RUNS:
                found[stage.name] = _checked(recipe, stage)
            for flag in {"step", "steps"} & stage.flags.keys():
                for config in map(found.get, stage.needs):
                    _check_steps(flag, stage.flags[flag][0], config)
            model = stage.flags.get("model_dir", ("",))[0]
            if stage.kind in MAY_BE_NAMED and not stage.needs and not files.exists(model):
                raise UserError(f"--model_dir={model}: no such folder")
            if stage.kind == "evaluate" and "metrics" in stage.flags:
                for config in filter(None, map(found.get, stage.needs)):
                    _check_metrics(stage.flags["metrics"][0].split(","), config.task_module)
            if stage.command == "export":
                _check_export(recipe, stage, found)
    return found


@contextlib.contextmanager
def named(stage: Stage) -> Iterator[None]:
    """Names a stage in the errors of a block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"[{stage.name}] {error}") from error


def _check_task(stage: Stage) -> None:
    """Raises UserError for a task that is neither known nor an objective for a corpus."""
    task, of_module = stage.flags["task"][0], "task_module" in stage.flags
    if "name" not in stage.flags and not of_module and registry.find(task) is None:
        raise UserError(
            f"--task={task}: there is no such objective or task{nearest(task, OBJECTIVES)}"
        )


def _check_runner(stage: Stage) -> None:
    """Raises UserError for a runner or flags that its command would refuse; starts nothing."""
    from pipeline.runners import engines

    kind = command(COMMANDS[stage.command]).flags
    engines.chosen(made(kind, parse(kind, stage.words)))


def _check_steps(flag: str, text: str, config: Config | None) -> None:
    """Raises UserError for checkpoints that a run cannot have."""
    if text in ("all", "latest", "None"):
        return
    try:
        last = max(int(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--{flag}={text}: give all, latest, or steps such as 1000,2000") from error
    if config and last > config.train_steps:
        raise UserError(f"--{flag}={text}: the run ends after {config.train_steps:,} updates")


def _checked(recipe: Recipe, stage: Stage) -> Config | None:
    from trainer.annexes.planning import planned_run

    planned_run.leave_devices()  # to the commands of the stages
    words = planning.words_of_run(recipe, stage)
    source = _start(recipe, stage)
    is_folder = from_transformers.is_folder(source)
    if is_folder and f"--{_START}={source}" not in words:
        words.append(f"--{_START}={source}")
    if stage.kind == "finetune" and not any(word.startswith(_GIVE_MODELS) for word in words):
        if source and not files.exists(source):
            raise UserError(f"--{_START}={source}: no such folder")
        return None
    with contextlib.redirect_stdout(io.StringIO()):  # what gin files have
        config, origins = configured(given_flags(OpenRunFlags, words))
    _check_metrics(config.evaluation.metrics, config.task_module)
    if project := config.metrics.wandb:
        with extras.needed(f"--metrics.wandb={project}", "wandb"):
            importlib.import_module("wandb")
    if not origins.get("model.vocab_size", "preset").startswith("preset") and not source:
        _check_vocabulary(recipe, config)
    _check_folder(recipe, stage, config, origins)
    if not config.data_scheme and config.engine == "palimpsest":
        config = _divided(config, origins)
    if source and not is_folder:
        _check_start(config, source)
    return config


def _start(recipe: Recipe, stage: Stage) -> str:
    """Returns what a run starts from, if no stage of the recipe makes it; else ""."""
    source = stage.flags.get(_START, ("",))[0]
    places = [each.output for each in recipe.stages if each.name in stage.needs]
    inside = any(source == place or source.startswith(f"{place}/") for place in places)
    return "" if inside else source


def _check_metrics(names: tuple[str, ...] | list[str], module: str | None) -> None:
    metric.chosen([name for name in names if name != TASK_METRICS], module)


def _check_folder(recipe: Recipe, stage: Stage, config: Config, origins: Mapping[str, str]) -> None:
    """Raises UserError if there is a run in a run's folder, and this recipe cannot resume it."""
    folder = stage.flags["model_dir"][0]
    if not files.exists(files.join(folder, CONFIG_FILE)):
        return
    steps = [name for name in files.list_names(folder) if name.startswith("checkpoint_")]
    if not steps or stage_state.states(recipe)[stage.name].word != stage_state.TODO:
        return  # of this recipe, which says what has changed
    before, _ = load_config(folder)
    values = dict(field_paths.leaves(config))
    given = {
        path: values[path] for path, origin in origins.items() if not origin.startswith("preset")
    }
    changes = [f"preset was {before.preset}, is {config.preset}"]
    if before.preset == config.preset:
        changes = resuming.config_changes(before, field_paths.replace_all(before, given), 0)
    if changes:
        raise UserError(
            f"--model_dir={folder} holds a run with different settings ({'; '.join(changes)}): "
            "name another folder, or delete it"
        )


def _check_vocabulary(recipe: Recipe, config: Config) -> None:
    """Raises UserError if the model has fewer rows than the vocabulary that the recipe trains."""
    from vocab.options import OptionFlags, options_of

    for stage in recipe.stages:
        if stage.kind == "vocabulary" and "extend" not in stage.flags:
            kind = command(COMMANDS[stage.command]).flags
            flags: Any = made(kind, parse(kind, stage.words))
            options = options_of(flags)[0] if isinstance(flags, OptionFlags) else flags
            size = options.vocab_size + options.extra_ids
            if config.model.vocab_size < size:
                raise UserError(
                    f"--model.vocab_size={config.model.vocab_size} is smaller than [vocabulary], "
                    f"which has {size} ids: leave it out, or give {size} or more"
                )


def _divided(config: Config, origins: dict[str, str]) -> Config:
    """Returns the configuration with its lengths and batch, after checking these and its mesh."""
    from trainer.annexes.planning import planned_run
    from trainer.setup import VOCABULARY_MULTIPLE, check_positions, check_task

    if task := planned_run.first_task(config):
        check_task(task, config)
    sizes = config.mesh.planned()
    devices = math.prod(max(size, 1) for size in sizes.values())
    if config.length_schedule:
        config = planned_run.of_longest_rows(config, origins, devices)
    planned = planned_run.subject(config, origins, devices)
    run, model = planned.config, planned.config.model
    check_positions(run, planned.converter)
    if origins.get("model.vocab_size", "").startswith("preset"):
        # The cache's vocabulary will decide, rounded up like this.
        rows = math.ceil(model.vocab_size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        model = replace(model, vocab_size=rows)
    check_dimensions(sizes, run.mesh.rules, model, run.phases.sizes, run.microbatches)
    return run


def _check_start(config: Config, source: str) -> None:
    """Raises UserError if parameters of a checkpoint do not fit; vocabularies may differ."""
    from trainer.checkpoints import layout
    from trainer.checkpoints.stored import load
    from trainer.initialization import init_from

    found = layout.read_parts(load(source))
    rows = [
        parts["value"].shape[0]
        for name, parts in found.items()
        if name.endswith("token_embedder/embedding")
    ]
    size = rows[0] if rows else config.model.vocab_size
    model = replace(config.model, vocab_size=size)
    init_from.fitted(f"--{_START}={source}", found, model, size, scanned=False)


def _check_export(recipe: Recipe, stage: Stage, runs: Mapping[str, Config | None]) -> None:
    """Raises UserError for flags that the command refuses, or a model transformers lacks."""
    from trainer.huggingface import configs, hub, weights

    if "max_shard_size" in stage.flags:
        weights.size(stage.flags["max_shard_size"][0])
    for repository in stage.flags.get("push_to", ()):
        try:
            hub.check(repository)
        except UserError as error:
            if "needs a write token" not in str(error):  # which this machine may lack
                raise
    if files.is_remote(stage.output):
        raise UserError(f"--output={stage.output}: give a local folder")
    there = os.path.lexists(files.local_path(stage.output))
    if there and stage_state.states(recipe)[stage.name].word in (
        stage_state.TODO,
        stage_state.BEGUN,
    ):
        raise UserError(f"--output={stage.output} exists: name another folder, or delete it")
    for config in (runs.get(name) for name in stage.needs):
        custom = stage.flags.get("custom_code", ("false",))[0].lower() == "true"
        if config and (why := configs.refusal(config.model, custom)):
            raise UserError(f'{why}: leave out the table, or write command = "export_t5x" in it')
