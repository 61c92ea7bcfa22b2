"""Converts checkpoints between T5X, Hugging Face transformers, Mesh TensorFlow and this trainer.

    python -m trainer.convert --from=PATH --to=FOLDER --format=huggingface|t5x|palimpsest

PATH is one checkpoint or a folder of them. Each is written under a temporary name, read back, and
compared bit for bit; where transformers can load one side, its logits are compared with ours. Only
then does it get its name, so the same command continues after a kill.
"""

from __future__ import annotations

from tasks.terminal import interrupt

if __name__ == "__main__":
    interrupt.end_at_once(  # also while the rest is imported
        "python -m trainer.convert", "run the same command again", terminated=True
    )

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from tasks.storage import files, whole_folder
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError

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


def _parser() -> Parser:
    parser = Parser(prog="python -m trainer.convert", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        required=True,
        metavar="PATH",
        help="one checkpoint or a folder of them: checkpoint_STEP of T5X or of this trainer, "
        "folders of transformers, model.ckpt-STEP of Mesh TensorFlow; local or, except for "
        "transformers, remote",
    )
    add("--to", required=True, metavar="FOLDER", help="local folder to write")
    add("--format", required=True, choices=_FORMATS, help="what to write")
    add("--steps", default="all", help="of a folder: all, latest, or steps such as 1000,2000")
    add("--dtype", default="float32", choices=_DTYPES, help="precision of the stored parameters")
    add("--vocabulary", metavar="FILE", help="vocabulary to write along, a file or a folder")
    add(
        "--extra_ids",
        type=int,
        metavar="N",
        help="sentinels that the model has beyond the vocabulary's pieces; T5: 100",
    )
    add(
        "--scan_layers",
        action="store_true",
        help="t5x: write the layout of examples/scalable_t5, which joins the layers of a stack",
    )
    add(
        "--custom_code",
        action="store_true",
        help="huggingface: write a modelling file for a model that transformers does not have",
    )
    add(
        "--push_to",
        metavar="OWNER/NAME",
        help="huggingface: upload each step as a branch step_N of this repository of the Hub, and "
        "the last one as main; the token is HF_TOKEN's",
    )
    add(
        "--task",
        default="",
        help="palimpsest: the task of a cache, with which trainer.evaluate, trainer.export and "
        "others then open the run",
    )
    add("--cache_dir", default="", help="palimpsest: folder or URL with the task's cache")
    add("--max_shard_size", help="huggingface: largest size of a weights file; 5GB if left out")
    model = parser.add_argument_group(
        "the model",
        "needed for checkpoints of T5X and Mesh TensorFlow without config.gin or "
        "operative_config.gin; --model.FIELD=VALUE changes a field, --gin.NAME=VALUE a binding",
    )
    model.add_argument("--preset", metavar="NAME", help="a preset, as t5_1_1_base")
    model.add_argument(
        "--gin_file", action="append", default=[], metavar="FILE", help="a gin file of the model"
    )
    model.add_argument(
        "--gin_search_paths",
        action="append",
        default=[],
        metavar="DIR,DIR",
        help="folders in which to look for gin files and the files they include",
    )
    return parser


def _settings(flags) -> Settings:
    """Returns how to write, after a check that every flag has an effect."""
    from tasks import vocabulary
    from trainer.conversion.targets import Settings
    from trainer.huggingface import weights

    for name, format in (
        ("scan_layers", "t5x"),
        ("custom_code", "huggingface"),
        ("max_shard_size", "huggingface"),
        ("push_to", "huggingface"),
        ("task", "palimpsest"),
        ("cache_dir", "palimpsest"),
    ):
        if getattr(flags, name) and flags.format != format:
            raise UserError(f"--{name} has no effect on --format={flags.format}")
    if bool(flags.task) != bool(flags.cache_dir):
        raise UserError("--task and --cache_dir need one another")
    if flags.format == "palimpsest" and flags.dtype != "float32":
        raise UserError("--dtype=bfloat16: this trainer keeps its parameters in float32")
    if flags.vocabulary and flags.format == "t5x":
        raise UserError("--vocabulary has no effect on --format=t5x: T5X's tasks name their own")
    if flags.extra_ids is not None and not flags.vocabulary:
        raise UserError("--extra_ids has no effect without --vocabulary")
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


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if what was written computes something different."""
    parser = _parser()
    flags, others = parser.parse_known_args(argv)
    for flag in others:
        if not flag.startswith(("--model.", "--gin.")):
            raise UserError(f"unknown flag {flag.partition('=')[0]}")
    bindings = [flag.removeprefix("--gin.") for flag in others if flag.startswith("--gin.")]
    if bindings and not flags.gin_file:
        raise UserError(f"--gin.{bindings[0]} needs a --gin_file")
    _check_packages(flags.format, bool(flags.vocabulary))

    from trainer.conversion.sources import Given
    from trainer.conversion.verify import NotEqual

    settings = _settings(flags)
    if flags.push_to:
        from trainer.huggingface import hub

        hub.check(flags.push_to)
    given = Given(
        flags.preset,
        tuple(flags.gin_file),
        tuple(path for paths in flags.gin_search_paths for path in paths.split(",")),
        tuple(bindings),
        tuple(flag for flag in others if flag.startswith("--model.")),
    )
    try:
        convert(flags.source, flags.to, settings, given, flags.steps, flags.push_to)
    except NotEqual as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
