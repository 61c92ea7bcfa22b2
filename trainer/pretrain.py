"""Pretrains a model.

python -m trainer.pretrain --preset=t5_1_1_small --task=rlm_span_corruption \\
        --cache_dir=DIR --model_dir=DIR [--train_steps=N] [--field.path=value]
python -m trainer.pretrain --gin_file=FILE [--gin_search_paths=DIR,DIR] [--gin.NAME=VALUE] \\
        --cache_dir=DIR
"""

from tasks.terminal import interrupt

if __name__ == "__main__":
    interrupt.end_at_once("python -m trainer.pretrain")  # also while the rest is imported

import argparse
import itertools
import sys
from typing import Any, NamedTuple

from tasks import registry
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from trainer.config import Config, fields, from_transformers
from trainer.config.help import HelpAction
from trainer.config.optimizer import OPTIMIZER_PRESETS, recipe
from trainer.config.presets import model_preset
from trainer.config.unused_fields import refuse_idle
from trainer.model.config import ModelConfig

# What a run that does not fit the memory may change, gentlest first.
_LESS_MEMORY = (
    "set --microbatches to divide the batch into parts with the same result, --model.remat=full to "
    "compute activations twice, a smaller --batch_size or another --preset; trainer.plan says "
    "what fits a device"
)


class Settings(NamedTuple):
    """Settings that a command makes before its flags are read.

    Attributes:
      origin: the origin of the values.
      values: field path -> value.
      model: a model that no preset describes; None: the preset's.
    """

    origin: str
    values: dict[str, Any]
    model: ModelConfig | None = None


def build_config(
    preset: str,
    overrides: list[str],
    optimizer_preset: str | None = None,
    settings: Settings | None = None,
) -> tuple[Config, dict[str, str]]:
    """Returns (the configuration, field path -> origin).

    Args:
      preset: the model.
      overrides: flags of fields.
      optimizer_preset: name of a recipe, or None.
      settings: what a command sets before its flags do.

    Raises:
      UserError: an unknown preset or field, a value of the wrong type, or a rejected value.
    """
    _import_task_module(overrides)
    from_folder = preset.startswith(from_transformers.PREFIX)
    if settings and settings.model:
        model, origin = settings.model, f"the run {preset}"
    else:
        model = from_transformers.folder_model(overrides) if from_folder else model_preset(preset)
        origin = f"preset {preset}"
    config = Config(preset=preset, model=model)
    origins = {path: origin for path, _ in fields.leaves(config) if path.startswith("model.")}
    origins["preset"] = "command line"
    if settings:
        config = fields.replace_all(config, settings.values)
        origins |= dict.fromkeys(settings.values, settings.origin)
    if optimizer_preset is not None:
        values = recipe(optimizer_preset)
        config = fields.replace_all(config, values)
        origins |= dict.fromkeys(values, f"optimizer preset {optimizer_preset}")
    return fields.override(config, origins, overrides), origins


def build_from_gin(
    gin_files: list[str],
    search_paths: list[str],
    flags: list[str],
    preset: str | None,
    overrides: list[str],
) -> tuple[Config, dict[str, str], list[tuple[str, str]]]:
    """Returns (the configuration, field path -> origin, (subject, text) lines to print).

    Raises:
      UserError: as `build_config` does, or because of a gin file; names file and line.
    """
    from trainer.gin import recipe

    _import_task_module(overrides)
    config, origins, notes = recipe.load(gin_files, search_paths, flags, preset, overrides)
    return fields.override(config, origins, overrides), origins, notes


def _import_task_module(overrides: list[str]) -> None:
    """Imports --task_module, which may register values that other flags name, such as mixers."""
    for flag, after in itertools.pairwise([*overrides, ""]):
        name, equals, value = flag.partition("=")
        if name.replace("-", "_") == "__task_module":
            registry.load(value if equals else after)


def main(argv: list[str]) -> int:
    arguments, others = _parser().parse_known_args(with_values(argv))
    return start(arguments, *configured(arguments, others))


def start(arguments: argparse.Namespace, config: Config, origins: dict[str, str]) -> int:
    """Trains, or prints the configuration if that is asked for; returns the exit code."""
    from trainer.setup import prepare

    if arguments.print_config:
        if config.cache_dir:
            config = prepare(config, origins).config
        print(fields.describe(config, origins, words=arguments.print_config == "words"))
        return 0

    from trainer.engine import determinism, hardware, processes

    determinism.set_flags(config.deterministic)
    with processes.joined(config.processes), hardware.enough_memory(_LESS_MEMORY):
        run = prepare(config, origins, training=True)

        if config.engine == "t5x":
            from trainer.starting import resume
            from trainer.t5x import engine

            return engine.train(run, origins, resume.start)

        from trainer.loop import train

        return train(run, origins)


_FOLLOW = "--follow"


def with_values(argv: list[str]) -> list[str]:
    """Returns the flags, each of those that may stand alone with the value that it stands for.

    These are --help, --print_config and --follow, which is --data.follow.

    argparse would read a following flag with a space, such as --optimizer.schedule='a * b', as
    their value.
    """
    given = list(argv)
    for index, (flag, after) in enumerate(itertools.pairwise([*argv, "--"])):
        if flag in ("--help", "-h") and after.startswith("-"):
            return ["--help"]
        if flag == "--print_config" and after.startswith("-"):
            given[index] = "--print_config=values"
        if flag.partition("=")[0] == _FOLLOW:
            given[index] = flag.replace(_FOLLOW, "--data.follow") + "=true" * ("=" not in flag)
    return given


def _parser() -> Parser:
    parser = Parser(
        prog="python -m trainer.pretrain",
        usage="%(prog)s --preset=NAME --task=TASK --cache_dir=DIR\n"
        "           --model_dir=DIR [--FIELD=VALUE ...]",
        description="Pretrains a model on a cache. Every field of the configuration is a flag: "
        "--train_steps=1000, --optimizer.learning_rate=0.5, --model.dropout_rate=0.1 …",
        add_help=False,
    )
    add_shown(parser)
    add_sources(parser)
    return parser


def add_shown(parser: Parser) -> None:
    """Adds --help and --print_config, which show the fields of a configuration."""
    parser.add_argument(
        *("--help", "-h"),
        action=HelpAction,
        nargs="?",
        metavar="GROUP",
        help="show this help, only one group of it, as --help=optimizer, or the models, "
        "--help=presets",
    )
    parser.add_argument(
        "--print_config",
        nargs="?",
        const="values",
        choices=("values", "words"),
        help="print every field with its value and origin, and exit; words: with its help, too",
    )


def add_sources(parser: Parser, gin: bool = True) -> None:
    """Adds the flags that name a preset, a recipe or gin files, which `configured` reads.

    Without `gin`, there are no gin files.
    """
    parser.add_argument("--preset", metavar="NAME", help="the model; --help=presets lists them")
    parser.add_argument(
        "--optimizer_preset",
        metavar="NAME",
        help="a published recipe of optimizer, schedule and loss, any field of which may be "
        f"overridden: {', '.join(OPTIMIZER_PRESETS)}",
    )
    if not gin:
        parser.set_defaults(gin_file=[], gin_search_paths=[], gin_param=[])
        return
    group = parser.add_argument_group(
        "gin files of T5X and Mesh T5", "read, never executed; docs/migrating_from_t5x.md"
    )
    group.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="a gin file; may be repeated, and later files override earlier ones",
    )
    group.add_argument(
        *("--gin_search_paths", "--gin_location_prefix"),
        action="append",
        default=[],
        metavar="DIR,DIR",
        help="folders in which to look for gin files and the files they include",
    )
    group.add_argument(
        *("--gin_param", "--gin_bindings"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a binding that overrides the files; --gin.NAME=VALUE, as in T5X, does the same",
    )


def configured(
    arguments: argparse.Namespace, others: list[str], settings: Settings | None = None
) -> tuple[Config, dict[str, str]]:
    """Returns (the configuration, field path -> origin); prints what gin files have to report.

    `settings` are those of `build_config`.

    Raises:
      UserError: flags are missing, contradict one another, or have no effect.
    """
    flags = [flag.removeprefix("--gin.") for flag in others if flag.startswith("--gin.")]
    flags = [*arguments.gin_param, *flags]
    overrides = [flag for flag in others if not flag.startswith("--gin.")]
    if arguments.gin_file:
        overrides = _without_foreign(overrides)
    if arguments.gin_file and arguments.optimizer_preset:
        raise UserError("--optimizer_preset and --gin_file both name an optimizer: leave out one")
    if arguments.gin_file:
        config, origins, notes = build_from_gin(
            arguments.gin_file,
            [path for paths in arguments.gin_search_paths for path in paths.split(",")],
            flags,
            arguments.preset,
            overrides,
        )
        for subject, text in notes:
            print(f"{subject}: {text}", flush=True)
    elif flags:
        raise UserError(f"--gin.{flags[0]} needs a --gin_file")
    else:
        preset = arguments.preset or from_transformers.named_folder(overrides)
        if not preset:
            fields.refuse_unknown(Config("", model_preset("t5_1_1_tiny")), overrides)
            raise UserError("--preset or --gin_file is missing")
        config, origins = build_config(preset, overrides, arguments.optimizer_preset, settings)
        config = from_transformers.adopt_model(config, origins)
    refuse_idle(config, origins)
    return config, origins


# Flags of T5X and Mesh T5 that stand beside gin files, and what takes their place.
_FOREIGN = {
    "alsologtostderr": "messages go to stderr",
    "logtostderr": "messages go to stderr",
    "gcp_project": "the machine that runs the command trains",
    "module_import": "nothing is imported; --task_module has further tasks",
    "multiprocess_gpu": "see --processes.coordinator",
    "t5_tfds_data_dir": "a cache has the data, --cache_dir",
    "tfds_data_dir": "a cache has the data, --cache_dir",
    "tpu": "the machine that runs the command trains",
    "tpu_zone": "the machine that runs the command trains",
}
_SWITCHES = ("alsologtostderr", "logtostderr", "multiprocess_gpu")


def _without_foreign(flags: list[str]) -> list[str]:
    """Returns flags without those of T5X and Mesh T5 that mean nothing here; prints each."""
    kept, rest = [], iter(flags)
    for flag in rest:
        name, equals, _ = flag.removeprefix("--").partition("=")
        if name not in _FOREIGN:
            kept.append(flag)
            continue
        print(f"read, no counterpart: --{name}: {_FOREIGN[name]}", flush=True)
        if not equals and name not in _SWITCHES:
            next(rest, None)
    return kept


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
