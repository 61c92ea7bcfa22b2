"""The command that pretrains.

    python -m trainer.pretrain --preset=t5_1_1_small --task=rlm_span_corruption \\
        --cache_dir=DIR --model_dir=DIR [--train_steps=N] [--field.path=value]
"""

import dataclasses
import sys
from typing import Any

from tasks import command_line
from tasks.command_line import Parser, UserError, nearest
from trainer import config as configuration
from trainer.config import Config
from trainer.optimizer_config import OPTIMIZER_PRESETS
from trainer.presets import MODEL_PRESETS, model_preset

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
        path: f"preset {preset}"
        for path, _ in configuration.leaves(config)
        if path.startswith("model.")
    }
    origins["preset"] = "command line"
    if optimizer_preset is not None:
        values = _recipe(optimizer_preset)
        config = configuration.replace_all(config, values)
        origins |= dict.fromkeys(values, f"optimizer preset {optimizer_preset}")
    return configuration.override(config, origins, overrides), origins


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
        "--optimizer_preset",
        help=f"a whole recipe, of which any --optimizer field may differ: "
        f"{', '.join(OPTIMIZER_PRESETS)}",
    )
    parser.add_argument(
        "--print_config",
        action="store_true",
        help="print every field with its value and origin, and stop",
    )
    arguments, overrides = parser.parse_known_args(argv)
    config, origins = build_config(arguments.preset, overrides, arguments.optimizer_preset)

    from trainer.setup import prepare

    if arguments.print_config and not config.cache_dir:
        print(configuration.describe(config, origins))
        return 0
    if arguments.print_config:
        print(configuration.describe(prepare(config, origins).config, origins))
        return 0

    from trainer import processes

    with processes.joined(config.processes):
        run = prepare(config, origins)

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
