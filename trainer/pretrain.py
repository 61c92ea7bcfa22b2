"""The command that pretrains.

    python -m trainer.pretrain --preset=t5_1_1_small --task=rlm_span_corruption \\
        --cache_dir=DIR --model_dir=DIR [--train_steps=N] [--field.path=value]
    python -m trainer.pretrain --gin_file=FILE [--gin_search_paths=DIR,DIR] [--gin.NAME=VALUE] \\
        --cache_dir=DIR
"""

import dataclasses
import sys
from typing import Any

from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, nearest
from trainer.config import Config, fields
from trainer.config.optimizer import OPTIMIZER_PRESETS
from trainer.config.presets import MODEL_PRESETS, model_preset

# What a recipe of OPTIMIZER_PRESETS means besides the optimizer: nanoT5 clips the gradient of the
# mean loss, and would clip that of the sum at every step; Mesh TensorFlow divides by all positions.
_LOSS_OF_RECIPE = {
    "nanot5": {"loss.normalizer": "num_real_target_tokens"},
    "primer": {"loss.normalizer": "num_total_target_tokens"},
}


def build_config(
    preset: str, overrides: list[str], optimizer_preset: str | None = None
) -> tuple[Config, dict[str, str]]:
    """Returns (the configuration, field path -> origin).

    Raises:
      UserError: an unknown preset or field, a value of the wrong type or one that is refused.
    """
    config = Config(preset=preset, model=model_preset(preset))
    origins = {
        path: f"preset {preset}" for path, _ in fields.leaves(config) if path.startswith("model.")
    }
    origins["preset"] = "command line"
    if optimizer_preset is not None:
        values = _recipe(optimizer_preset)
        config = fields.replace_all(config, values)
        origins |= dict.fromkeys(values, f"optimizer preset {optimizer_preset}")
    return fields.override(config, origins, overrides), origins


def _recipe(name: str) -> dict[str, Any]:
    """Field path -> value of a recipe of OPTIMIZER_PRESETS."""
    if name not in OPTIMIZER_PRESETS:
        raise UserError(
            f"unknown optimizer preset {name}{nearest(name, OPTIMIZER_PRESETS)}; known: "
            f"{', '.join(OPTIMIZER_PRESETS)}"
        )
    fields = dataclasses.asdict(OPTIMIZER_PRESETS[name])
    of_optimizer = {f"optimizer.{field}": value for field, value in fields.items()}
    return {**of_optimizer, **_LOSS_OF_RECIPE.get(name, {})}


def build_from_gin(
    gin_files: list[str],
    search_paths: list[str],
    flags: list[str],
    preset: str | None,
    overrides: list[str],
) -> tuple[Config, dict[str, str], list[tuple[str, str]]]:
    """Returns (the configuration, field path -> origin, (subject, text) lines to print).

    Raises:
      UserError: what `build_config` refuses, or a gin file; names file and line.
    """
    from trainer.gin import recipe

    config, origins, notes = recipe.load(gin_files, search_paths, flags, preset, overrides)
    return fields.override(config, origins, overrides), origins, notes


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m trainer.pretrain",
        description="Pretrains a model on a cache. Any field of the configuration is a flag: "
        "--train_steps=1000, --optimizer.learning_rate=0.5, --model.dropout_rate=0.1 …",
        epilog=_fields(),
        formatter_class=command_line.RawHelp,
    )
    parser.add_argument("--preset", help=", ".join(MODEL_PRESETS))
    parser.add_argument(
        "--optimizer_preset",
        help=f"a whole recipe, of which any --optimizer field may differ: "
        f"{', '.join(OPTIMIZER_PRESETS)}",
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every field with its value and origin, and stop",
    )
    gin = parser.add_argument_group(
        "gin files of T5X and Mesh T5", "read, never executed; docs/migrating_from_t5x.md"
    )
    gin.add_argument(
        "--gin_file", action="append", default=[], help="may be given again; the last holds"
    )
    gin.add_argument(
        *("--gin_search_paths", "--gin_location_prefix"),
        action="append",
        default=[],
        metavar="DIR,DIR",
        help="where gin files and what they include are sought",
    )
    gin.add_argument(
        *("--gin_param", "--gin_bindings"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a binding after the files; as T5X has it: --gin.NAME=VALUE",
    )
    arguments, others = parser.parse_known_args(argv)
    flags = [flag.removeprefix("--gin.") for flag in others if flag.startswith("--gin.")]
    flags = [*arguments.gin_param, *flags]
    overrides = [flag for flag in others if not flag.startswith("--gin.")]
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
    elif not arguments.preset:
        raise UserError("--preset or --gin_file is missing")
    else:
        config, origins = build_config(arguments.preset, overrides, arguments.optimizer_preset)

    from trainer.setup import prepare

    if arguments.print_config and not config.cache_dir:
        print(fields.describe(config, origins))
        return 0
    if arguments.print_config:
        print(fields.describe(prepare(config, origins).config, origins))
        return 0

    from trainer.engine import processes

    with processes.joined(config.processes):
        run = prepare(config, origins)

        if config.engine == "t5x":
            from trainer import t5x_engine

            return t5x_engine.train(run, origins)

        from trainer.loop import train

        return train(run, origins)


def _fields() -> str:
    config = Config(preset="t5_1_1_small", model=model_preset("t5_1_1_small"))
    lines = [f"  --{path}={value}" for path, value in fields.leaves(config) if path != "preset"]
    return "\n".join(["fields, with the values of t5_1_1_small:", *lines])


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
