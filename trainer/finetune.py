"""Fine-tunes a model.

    python -m trainer.finetune --init_from=DIR --task=TASK --model_dir=DIR [--field.path=value]

It is trainer.pretrain with other defaults: T5's constant learning rate of 1e-3 and dropout of 0.1,
parameters without the optimizer's state, and the model that --init_from holds.
"""

from tasks.terminal import interrupt

if __name__ == "__main__":
    interrupt.end_at_once("python -m trainer.finetune")  # also while the rest is imported

import re
import sys

from tasks import registry
from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from trainer import pretrain
from trainer.config import CONFIG_FILE, fields, from_transformers
from trainer.config.optimizer import recipe
from trainer.model.config import ModelConfig

_RECIPE = "t5x_finetune"


def main(argv: list[str]) -> int:
    arguments, others = _parser().parse_known_args(pretrain.with_values(argv))
    source = from_transformers.flag_value(others, "init_from")
    if not source:
        raise UserError(
            "--init_from is missing: name a run, a checkpoint of T5X, or hf:DIR of transformers"
        )
    values = {
        **recipe(arguments.optimizer_preset or _RECIPE),
        # Source: Raffel et al. 2020 (arXiv:1910.10683), section 3.1.2.
        "model.dropout_rate": 0.1,
        "init_from": source,
        "init_from_state": False,
    }
    model = None
    if not arguments.preset and not source.startswith(from_transformers.PREFIX):
        own = from_transformers.flag_value(others, "model_dir")
        arguments.preset, model = source, _model(source, own)
    settings = pretrain.Settings("fine-tuning", values, model)
    return pretrain.start(arguments, *pretrain.configured(arguments, others, settings))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m trainer.finetune",
        usage="%(prog)s --init_from=DIR --task=TASK --model_dir=DIR\n"
        "           [--cache_dir=DIR] [--FIELD=VALUE ...]",
        description="Fine-tunes a model. Every field of the configuration is a flag, as of "
        "trainer.pretrain; unless set, the optimizer is Adafactor with a constant rate of 1e-3, "
        "dropout is 0.1, and only parameters are taken from --init_from.",
        add_help=False,
    )
    pretrain.add_shown(parser)
    pretrain.add_sources(parser, gin=False)
    return parser


def _model(source: str, own: str | None) -> ModelConfig:
    """Returns the model of one of our runs, given by its folder or by one of its checkpoints.

    The fine-tuned run's `own` folder has the model as well, which is enough to resume.

    Raises:
      UserError: the folder has no configuration of a run.
    """
    folder = source.rstrip("/")
    for path in (folder, re.sub(r"/checkpoint_\d+$", "", folder), *([own] if own else ())):
        config = files.join(path, CONFIG_FILE)
        if files.exists(config):
            stored = files.read_json(config)
            if "config" in stored and "model" in stored["config"]:
                if module := stored["config"].get("task_module"):  # may register parts of models
                    registry.load(module)
                return fields.from_dict(ModelConfig, stored["config"]["model"], config)
    raise UserError(
        f"--init_from={source} is no run of this trainer (it has no {CONFIG_FILE}): give its "
        "--preset, or hf:DIR for a model of transformers"
    )


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
