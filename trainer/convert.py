"""Converts checkpoints between T5X, transformers and ours.

    python -m trainer.convert --from=PATH --to=FOLDER --format=huggingface|t5x|palimpsest

Formats are those of T5X, Hugging Face transformers, Mesh TensorFlow (read only) and this trainer.
PATH is one checkpoint or a folder of them. Each is written under a temporary name, read back, and
compared bit for bit; if transformers can load one side, its logits are compared with ours. Only
then does it get its name, so the same command continues after a kill.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from tasks.storage import files, whole_folder
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import REQUIRED, ReadIf, field

if TYPE_CHECKING:
    from trainer.conversion.sources import Given, Opened, Source
    from trainer.conversion.targets import Arrays, Settings
    from trainer.data.prepared import Run

_FORMATS = ("huggingface", "t5x", "palimpsest")
_DTYPES = ("float32", "bfloat16")
_EXIT_NOT_EQUAL = 1


class Converted(NamedTuple):
    """A converted checkpoint.

    Attributes:
      path: where it is.
      step: number of updates made.
      checks: the results of the checks.
    """

    path: str
    step: int
    checks: tuple[str, ...]


def convert(
    source: str,
    target: str,
    settings: Settings,
    given: Given,
    steps: str = "all",
    push_to: str | None = None,
) -> list[Converted]:
    """Converts the checkpoints at a path, oldest first, and prints a line for each.

    Names and shapes of all of them are checked before the first is written.

    Args:
      source: one checkpoint, or a folder of them.
      target: local folder to write.
      settings: format and details.
      given: the model, if the checkpoints do not describe it.
      steps: which checkpoints of a folder: "all", "latest" or "1000,2000".
      push_to: repository of the Hub, to which folders of transformers are uploaded.

    Raises:
      UserError: nothing can be read there, the model is not known or the format does not have it,
        or something else is in the target.
      NotEqual: what was written differs. It was deleted.
    """
    from trainer.checkpoints.checkpoint import chosen_steps
    from trainer.conversion import sources, targets

    if files.is_remote(target):
        raise UserError(f"--to={target}: give a local folder")
    target = os.path.abspath(files.local_path(target))
    found, several = sources.find(source)
    wanted = chosen_steps(steps, [each.step for each in found], source)
    found = [each for each in found if each.step in wanted]
    for each in found:
        targets.refuse(sources.opened(each, given), settings)
    made = []
    for each in found:
        made.append(_convert_one(each, target, several, settings, given))
        if push_to:
            _push(made[-1], push_to, each.path, last=each is found[-1])
    return made


def _push(made: Converted, repository: str, source: str, last: bool) -> None:
    """Uploads a folder; the last one is also the repository's `main`."""
    from trainer.huggingface import hub

    message = f"Step {made.step:,}, converted from {os.path.basename(source.rstrip('/'))}"
    url = hub.push(made.path, repository, made.step, message, "\n".join(made.checks), last)
    print(f"{made.path}: uploaded to {url}", flush=True)


def _convert_one(
    source: Source, target: str, several: bool, settings: Settings, given: Given
) -> Converted:
    from trainer.conversion import sources, targets

    opened = sources.opened(source, given)
    in_folder = several or settings.format != targets.HUGGING_FACE
    return write(opened, target, in_folder, settings)


def write(opened: Opened, target: str, in_folder: bool, settings: Settings) -> Converted:
    """Writes an opened checkpoint, checks it, and prints a line; keeps a finished one.

    Args:
      opened: the checkpoint.
      target: local folder.
      in_folder: writes `target/checkpoint_STEP`, not `target` itself.
      settings: format and details.

    Raises:
      UserError: something else is there.
      NotEqual: what was written differs. It was deleted.
    """
    from trainer.conversion import record, targets

    path = os.path.join(target, f"checkpoint_{opened.step}") if in_folder else target
    vocabulary = settings.vocabulary
    made = record.Record(
        opened.source.path,
        opened.step,
        settings.format,
        settings.dtype,
        settings.scanned,
        opened.model.config,
        opened.model.name,
        opened.model.positions,
        vocabulary.record.sha256 if vocabulary else None,
    ).as_json()
    run = None
    if settings.format == targets.OURS:
        run = targets.run_of(target, opened, settings)
        targets.write_run_files(run, vocabulary)
    if record.is_finished(path, made):
        print(f"{path}: is there already", flush=True)
        return Converted(path, opened.step, tuple(record.checks(path)))
    arrays = targets.values(opened, settings.dtype)
    with files.naming_full_disk(path), whole_folder.written(path) as partial:
        checks = _write(partial, os.path.basename(path), opened, arrays, settings, run)
        made["checks"] = checks
        files.write_json(os.path.join(partial, record.FILE), made)
    print(f"{path}: step {opened.step:,}; {'; '.join(checks)}", flush=True)
    return Converted(path, opened.step, checks)


def _write(
    partial: str, name: str, opened: Opened, arrays: Arrays, settings: Settings, run: Run | None
) -> tuple[str, ...]:
    """Writes a checkpoint into a temporary folder, and returns the results of its checks."""
    from trainer.conversion import targets, verify

    logits = ""
    if opened.source.transformers:
        plain = targets.values(opened, "float32")
        logits = verify.logits(opened.source.path, opened.model.config, plain)
    if settings.format == targets.HUGGING_FACE:
        from trainer.conversion import card

        model, folded = targets.for_transformers(opened, arrays)
        written = targets.to_transformers(partial, opened, model, folded, settings)
        count = verify.transformers_arrays(partial, model, written["model_type"], folded)
        logits = verify.logits(partial, opened.model.config, arrays)
        checks = _checks(count, logits)
        source = os.path.basename(opened.source.path.rstrip("/"))
        has_tokenizer = bool(settings.vocabulary and not settings.vocabulary.is_registered)
        text = card.converted_card(model, name, source, opened.step, checks, has_tokenizer)
        files.write_bytes(os.path.join(partial, "README.md"), text.encode())
        return checks
    if run:
        moments = targets.to_ours(partial, run, opened, arrays, settings)
    else:
        moments = targets.to_t5x(partial, opened, arrays, settings)
    inside = os.path.join(partial, f"checkpoint_{opened.step}")
    count = verify.checkpoint_arrays(inside, opened.model.config, arrays)
    for entry in os.listdir(inside):
        os.rename(os.path.join(inside, entry), os.path.join(partial, entry))
    os.rmdir(inside)
    return (*_checks(count, logits), moments)


def _checks(count: int, logits: str) -> tuple[str, ...]:
    arrays = f"{count} parameters are bit for bit those of the source in the stored precision"
    return (arrays, *([f"logits: {logits}"] if logits else []))


def _check_packages(format: str, vocabulary: bool) -> None:
    from trainer.huggingface import EXTRA

    wanted = ["safetensors", "huggingface_hub"] if format == "huggingface" else []
    wanted += ["sentencepiece", "tokenizers"] if vocabulary else []
    for name in wanted:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"converting to {format} needs the package {name}: {EXTRA}")


def _only(format: str) -> ReadIf:
    return ReadIf(lambda flags: flags.format == format, lambda flags: f"on --format={flags.format}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The model of a checkpoint that does not describe it."""

    preset: str | None = field(None, "a preset, as t5_1_1_base", metavar="NAME")
    gin_file: tuple[str, ...] = field(
        (), "a gin file of the model; may be repeated", metavar="FILE", repeated=True
    )
    gin_search_paths: tuple[str, ...] = field(
        (),
        "folders to search for gin files and for the files that they include",
        metavar="DIR,DIR",
        repeated=True,
    )
    gin_param: tuple[str, ...] = field(
        (),
        "binding that overrides the files; --gin.NAME=VALUE does the same",
        metavar="NAME=VALUE",
        repeated=True,
        aliases=("gin.*",),
    )
    model: tuple[str, ...] = field(
        (),
        "a field of the model; usually written as --model.FIELD=VALUE",
        metavar="FIELD=VALUE",
        repeated=True,
        aliases=("model.*",),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    source: str = field(
        REQUIRED,
        "checkpoint or folder of checkpoints: checkpoint_STEP of T5X or of this trainer, folders "
        "of transformers, model.ckpt-STEP of Mesh TensorFlow; local or, except for transformers, "
        "remote",
        name="from",
        metavar="PATH",
    )
    to: str = field(REQUIRED, "local folder to write", metavar="FOLDER")
    format: str = field(REQUIRED, "what to write", choices=_FORMATS)
    steps: str = field("all", "steps of a folder to convert: all, latest, or as 1000,2000")
    dtype: str = field(
        "float32",
        "precision of the stored parameters",
        choices=_DTYPES,
        read_if=ReadIf(
            lambda flags: flags.format != "palimpsest",
            "on --format=palimpsest, which keeps its parameters in float32",
        ),
    )
    vocabulary: str | None = field(
        None,
        "vocabulary to write along, a file or a folder",
        metavar="FILE",
        read_if=ReadIf(
            lambda flags: flags.format != "t5x",
            "on --format=t5x: T5X's tasks name their own",
        ),
    )
    extra_ids: int | None = field(
        None,
        "number of the model's sentinels beyond the pieces of the vocabulary; T5: 100",
        read_if=ReadIf(lambda flags: flags.vocabulary is not None, "without --vocabulary"),
    )
    scan_layers: bool = field(
        False,
        "t5x: write the layout of examples/scalable_t5, which joins the layers of a stack",
        read_if=_only("t5x"),
    )
    custom_code: bool = field(
        False,
        "huggingface: write a modelling file for a model that transformers does not have",
        read_if=_only("huggingface"),
    )
    push_to: str | None = field(
        None,
        "huggingface: upload each step as a branch step_N of this repository of the Hub, and the "
        "last one also as main, with the token in HF_TOKEN",
        metavar="OWNER/NAME",
        read_if=_only("huggingface"),
    )
    task: str = field(
        "",
        "palimpsest: task of a cache, with which trainer.evaluate, trainer.export and others open "
        "the run",
        read_if=_only("palimpsest"),
    )
    cache_dir: str = field(
        "", "palimpsest: folder or URL with the task's cache", read_if=_only("palimpsest")
    )
    max_shard_size: str | None = field(
        None,
        "huggingface: largest size of a weights file; None: 5GB",
        read_if=_only("huggingface"),
    )
    model: ModelFlags = field(
        ModelFlags,
        "the model, for checkpoints of T5X and Mesh TensorFlow without config.gin or "
        "operative_config.gin",
        flat=True,
    )


def _settings(flags: Flags) -> Settings:
    """Returns how to write."""
    from tasks import vocabulary
    from trainer.conversion.targets import Settings
    from trainer.huggingface import weights

    if bool(flags.task) != bool(flags.cache_dir):
        raise UserError("--task and --cache_dir need one another")
    found = flags.vocabulary and vocabulary.load(flags.vocabulary, flags.extra_ids or 0)
    return Settings(
        flags.format,
        flags.dtype,
        flags.scan_layers,
        flags.custom_code,
        weights.size(flags.max_shard_size or "5GB"),
        found or None,
        flags.task,
        flags.cache_dir,
    )


def run(flags: Flags) -> int:
    """Converts; returns 1 if what was written computes something different."""
    model = flags.model
    if model.gin_param and not model.gin_file:
        raise UserError(f"--gin.{model.gin_param[0]} needs a --gin_file")
    _check_packages(flags.format, bool(flags.vocabulary))

    from trainer.conversion.sources import Given
    from trainer.conversion.verify import NotEqual

    settings = _settings(flags)
    if flags.push_to:
        from trainer.huggingface import hub

        hub.check(flags.push_to)
    given = Given(
        model.preset,
        model.gin_file,
        tuple(path for paths in model.gin_search_paths for path in paths.split(",")),
        model.gin_param,
        tuple(f"--model.{each}" for each in model.model),
    )
    try:
        convert(flags.source, flags.to, settings, given, flags.steps, flags.push_to)
    except NotEqual as error:
        print(f"trainer.convert: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


main = Command(Flags, run, at_once="run the same command again", terminated=True)

if __name__ == "__main__":
    main.start()
