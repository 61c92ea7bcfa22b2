"""Translates gin files and flags of a T5X command into a configuration, origins and notes."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from tasks import annexes, registry
from tasks.objectives import span_corruption_lengths
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds
from trainer.annexes.gin import includes, reader, t5x_model_table, t5x_run_table
from trainer.annexes.gin.reader import Binding, Macro, Statements, Value
from trainer.annexes.gin.translate import Reading, typed
from trainer.config import Config, field_paths
from trainer.config.presets import MODEL_PRESETS, model_preset
from trainer.data.startup import WASTEFUL

# Packages of T5X, Mesh T5 and their dependencies. Modules in them define no tasks.
_LIBRARIES = ("__gin__", "__main__", "t5x", "seqio", "optax", "flax", "jax", "mesh_tensorflow")
_WITHOUT_TASKS = ("t5.models.mesh_transformer", "t5_models")

_REQUIRED = Macro(reader.REQUIRED)

# Endings of origins outside the user's files.
_DEFAULTS = ("(built in)", "DatasetConfig.use_cached", "DatasetConfig.pack")


class Recipe(NamedTuple):
    """The run that files and flags describe; `notes` are (subject, text) lines to print."""

    config: Config
    origins: dict[str, str]
    notes: list[tuple[str, str]]


def load(
    gin_files: Sequence[str],
    search_paths: Sequence[str],
    flags: Sequence[str],
    preset: str | None,
    overrides: Sequence[str],
) -> Recipe:
    """Reads gin files, later ones overriding earlier ones, and NAME=VALUE `flags`.

    `preset` overrides the files' model. `overrides` are `--field=value` flags, not applied here.
    Errors name file and line.
    """
    dialects = annexes.every("gin_dialects")
    described = dict(includes.DESCRIPTIONS)
    for each in dialects:
        described.update(each.DESCRIPTIONS)
    statements = reader.read(gin_files, search_paths, flags, described)
    statements.bindings += _given(statements.bindings, overrides)
    named = preset or "+".join(os.path.basename(path) for path in gin_files)
    selectors = {binding.selector for binding in statements.bindings}
    dialect = next((each for each in dialects if each.is_written_in(selectors)), None)
    if dialect:
        has_task = _flag(overrides, "task") is not None
        reading, preset = dialect.read(statements, preset, has_task)
    else:
        reading = _read_t5x(statements, preset)
    _set_seed(reading)
    _set_task(reading, overrides)
    _warn_of_vocabulary(reading)
    _note_imports(reading, _flag(overrides, "task_module"))
    reading.report_unused()
    return _configured(reading, named, preset)


def _read_t5x(statements: Statements, preset: str | None) -> Reading:
    """Returns what files of T5X mean; a `preset` overrides their model."""
    if preset:
        no_model = Binding("", "MODEL", "", None, f"preset {preset}", True)
        statements.bindings.insert(0, no_model)
    reading = Reading(statements, t5x_run_table.KNOWN)
    reading.walk(t5x_run_table.TRAIN)
    t5x_model_table.check_cosine(reading)
    _set_microbatch_law(reading)
    _leave_out_own_folder(reading)
    reading.finish(includes.MACROS)
    return reading


def _given(bindings: Sequence[Binding], overrides: Sequence[str]) -> list[Binding]:
    """Returns bindings for macros that our flags set and the files leave unset."""
    values = {binding.name: binding.value for binding in bindings if not binding.argument}
    given = []
    for macro, name in reader.OURS.items():
        text = _flag(overrides, name)
        if text and values.get(macro, _REQUIRED) == _REQUIRED:
            number = name == "train_steps" and text.isdecimal()
            value = int(text) if number else text.removeprefix("seqio:")
            given.append(Binding("", macro, "", value, f"--{name}", True))
    return given


def _set_microbatch_law(reading: Reading) -> None:
    """Normalizes each microbatch separately, as T5X does, if the files set both fields."""
    parts, normalizer = (reading.fields.get(name) for name in ("microbatches", "loss.normalizer"))
    if parts and normalizer and parts.value != 1 and normalizer.value != "sum":
        origin = f"T5X's rule for num_microbatches ({parts.origin})"
        reading.set("loss.normalize_over", "microbatch", origin)
        reading.warn(
            f"num_microbatches = {parts.value} ({parts.origin}) with loss_normalizing_factor "
            f"({normalizer.origin}): each microbatch is normalized separately, as in T5X; with "
            "--loss.normalize_over=batch the result does not depend on num_microbatches"
        )


def _leave_out_own_folder(reading: Reading) -> None:
    """Leaves out a checkpoint to start from that is the run's own folder."""
    start, own = (reading.fields.get(name) for name in ("init_from", "model_dir"))
    if start and own and start.value == own.value:
        del reading.fields["init_from"]
        reading.warn(
            f"RestoreCheckpointConfig.path is the model_dir ({start.origin}): a run resumes from "
            "it without that, and starts from the beginning if it has no checkpoint"
        )


def _set_seed(reading: Reading) -> None:
    run, data = reading.facts.get("random_seed"), reading.facts.get("data_seed")
    seeds = [each for each in (run, data) if each is not None and each.value is not None]
    if seeds:
        reading.set("seed", *seeds[0])
    for found, what in (
        (run, "initial parameters and dropout"),
        (data, "the order of the data and its noise"),
    ):
        where = f" ({found.origin})" if found else ""
        seed = seeds[0].value if seeds else Config.seed
        if found is None or found.value is None:
            reading.warn(
                f"{what} have no seed{where}: here the seed is {seed} (--seed), so all runs are "
                "the same"
            )
        elif found.value != seed:
            reading.warn(
                f"{what} have the seed {found.value}{where}: here the only seed is --seed, which "
                f"is {seed}"
            )


def _set_task(reading: Reading, overrides: Sequence[str]) -> None:
    found = reading.facts["task"]
    known = registry.names(_flag(overrides, "task_module"))
    task = found.value if found.value in known else f"seqio:{found.value}"
    reading.set("task", task, found.origin)
    task = _flag(overrides, "task") or task
    facts = reading.facts
    settings = {name: facts[name] for name in ("use_cached", "pack") if name in facts}
    cached = settings.get("use_cached")
    if task.startswith("seqio:"):
        for name, value in settings.items():
            reading.set(f"data.{name}", *value)
        if cached and cached.value:
            reading.warn(
                f"use_cached = True ({cached.origin}), but {task} is a seqio task: if it has no "
                "seqio cache in --cache_dir, its text is tokenized during training"
            )
    else:
        for name, value in settings.items():
            if value.value is not True and not value.origin.endswith(_DEFAULTS):
                reading.idle(
                    f"{name} = {value.value} ({value.origin}): {task} is read from a cache, whose "
                    "windows fill their rows and whose noise differs from epoch to epoch"
                )
    shuffle = reading.facts.get("shuffle")
    if shuffle and not shuffle.value:
        reading.set("data.shuffle", "none", shuffle.origin)
        reading.warn(f"shuffle = False ({shuffle.origin}): windows are read in the cache's order")
    bidirectional = reading.facts.get("bidirectional")
    alone = reading.fields.get("model.family", Value("", "")).value == "lm"
    if alone and "lengths.inputs" in reading.fields and not (bidirectional and bidirectional.value):
        reading.warn(
            "inputs_bidirectional_attention is not True: here, a decoder always attends to the "
            "inputs of a task in both directions"
        )
    _warn_of_padding(reading, found.value)


def _flag(overrides: Sequence[str], name: str) -> str | None:
    value = None
    for place, flag in enumerate(overrides):
        key, equals, text = flag.removeprefix("--").partition("=")
        if key.replace("-", "_") == name:
            value = text if equals else next(iter(overrides[place + 1 : place + 2]), None)
    return value


def _warn_of_padding(reading: Reading, task: str) -> None:
    lengths = reading.facts["lengths"]
    inputs, targets = (lengths.value.get(side) for side in ("inputs", "targets"))
    if "span_corruption" not in task or not inputs or not targets:
        return
    filled = span_corruption_lengths(inputs)[1]
    if filled < WASTEFUL * targets:
        reading.warn(
            f"targets of {targets} ({lengths.origin}): T5's span corruption of {inputs} inputs "
            f"fills {filled} positions, {filled / targets:.1%}; the rest is padding, which "
            f"--lengths.targets={filled} avoids"
        )


def _warn_of_vocabulary(reading: Reading) -> None:
    found = reading.fields.get("vocabulary.model_file")
    if not found or not isinstance(found.value, str):
        return
    own = reading.fields.get("vocabulary.extra_ids")
    if own and own.value:
        return
    if not files.is_remote(found.value):
        if not files.exists(found.value):
            return
        try:
            last = TokenIds(0, 0, files.read_bytes(found.value)).pieces[-1]
        except (IndexError, KeyError, ValueError) as error:
            raise UserError(
                f"{found.origin}: {found.value} is not a SentencePiece model"
            ) from error
        collide = "extra_id_" not in last
        text = f"and its last piece is {last!r}"
    else:
        collide = "extra" not in found.value
        text = "and its name does not suggest that its last pieces are sentinels"
    if collide:
        where = own.origin if own else found.origin
        reading.warn(
            f"extra_ids of {found.value} is 0 ({where}) {text}: its last text pieces would "
            "serve as sentinels; pipeline.build's caches are then refused unless they were "
            "built with --extra_ids=100"
        )


def _note_imports(reading: Reading, task_module: str | None) -> None:
    given = pathlib.PurePath(task_module or "").name.removesuffix(".py")
    for module, place in reading.statements.imports:
        known = module.partition(".")[0] in _LIBRARIES or module in (
            *_WITHOUT_TASKS,
            task_module,
            given,
        )
        if not known:
            text = f"{module} ({place}): --task_module={module} makes its tasks available"
            reading.notes.append(("not imported", text))


def _configured(reading: Reading, name: str, preset: str | None) -> Recipe:
    if "model.family" not in reading.fields and not preset:
        raise UserError(
            "these files do not name a model: include a file that does, such as "
            "'t5x/examples/t5/t5_1_1/base.gin', or set --preset"
        )
    tied = reading.fields.get("model.tied_logits")
    if reading.fields.get("model.family", Value("", "")).value == "t5_1_1" and tied and tied.value:
        reading.set("model.family", "t5_1_0", reading.fields["model.family"].origin)
    base = preset or next(iter(MODEL_PRESETS))
    config = Config(preset=name, model=model_preset(base))
    origins = {"preset": "command line"}
    if preset:
        leaves = dict(field_paths.leaves(config))
        origins |= {path: f"preset {preset}" for path in leaves if path.startswith("model.")}
    values: dict[str, Any] = {}
    for path, found in reading.fields.items():
        values[path] = typed(found, path, field_paths.field_type(config, path))
        origins[path] = found.origin
    try:
        config = field_paths.replace_all(config, values)
    except field_paths.RejectedField as error:
        rejected = f"{error.path} is {error.rejected.value!r}; it must be {error.rejected.rule}"
        where = origins.get(error.path, "these files")
        raise UserError(f"{where}: {rejected}") from error
    return Recipe(config, origins, reading.notes)
