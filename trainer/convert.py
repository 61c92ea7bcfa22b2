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

import sys
from typing import TYPE_CHECKING

from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError

if TYPE_CHECKING:
    from trainer.conversion.targets import Settings

_FORMATS = ("huggingface", "t5x", "palimpsest")
_DTYPES = ("float32", "bfloat16")
_EXIT_NOT_EQUAL = 1


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
    from trainer.conversion import packages

    packages.check_packages(flags.format, bool(flags.vocabulary))

    from trainer.conversion import converting
    from trainer.conversion.sources import Given
    from trainer.conversion.verify import NotEqual

    settings = _settings(flags)
    if flags.push_to:
        converting.check_push(flags.push_to)
    given = Given(
        flags.preset,
        tuple(flags.gin_file),
        tuple(path for paths in flags.gin_search_paths for path in paths.split(",")),
        tuple(bindings),
        tuple(flag for flag in others if flag.startswith("--model.")),
    )
    try:
        converting.convert(flags.source, flags.to, settings, given, flags.steps, flags.push_to)
    except NotEqual as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
