"""The command that pretrains.

    python -m trainer.pretrain --preset=t5_1_1_small --task=rlm_span_corruption \\
        --cache_dir=DIR --model_dir=DIR [--train_steps=N] [--field.path=value]
"""

import sys

from tasks import command_line
from tasks.command_line import Parser
from trainer import config as configuration
from trainer.config import Config
from trainer.presets import MODEL_PRESETS, model_preset


def build_config(preset: str, overrides: list[str]) -> tuple[Config, dict[str, str]]:
    """Returns (the configuration, field path -> origin).

    Raises:
      UserError: an unknown preset or field, or a value of the wrong type.
    """
    config = Config(preset=preset, model=model_preset(preset))
    origins = {
        path: f"preset {preset}"
        for path, _ in configuration.leaves(config)
        if path.startswith("model.")
    }
    origins["preset"] = "command line"
    return configuration.override(config, origins, overrides), origins


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m trainer.pretrain",
        description="Pretrains a model on a cache. Any field of the configuration is a flag: "
        "--train_steps=1000, --optimizer.learning_rate=0.5, --model.dropout_rate=0.1 …",
        epilog=_fields(),
        formatter_class=command_line.RawHelp,
    )
    parser.add_argument("--preset", required=True, help=", ".join(MODEL_PRESETS))
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every field with its value and origin, and stop",
    )
    arguments, overrides = parser.parse_known_args(argv)
    config, origins = build_config(arguments.preset, overrides)

    from trainer.setup import prepare

    if arguments.print_config and not config.cache_dir:
        print(configuration.describe(config, origins))
        return 0
    run = prepare(config, origins)
    if arguments.print_config:
        print(configuration.describe(run.config, origins))
        return 0

    from trainer.loop import train

    return train(run, origins)


def _fields() -> str:
    config = Config(preset="t5_1_1_small", model=model_preset("t5_1_1_small"))
    lines = [
        f"  --{path}={value}" for path, value in configuration.leaves(config) if path != "preset"
    ]
    return "\n".join(["fields, with the values of t5_1_1_small:", *lines])


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
