"""Fine-tunes a model.

    python -m trainer.finetune --init_from=DIR --task=TASK --model_dir=DIR [--field.path=value]

It is trainer.pretrain with different defaults: T5's constant learning rate of 1e-3, dropout of 0.1,
and the model and parameters of --init_from, without the optimizer's state.
"""

from typing import Any

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError

_RECIPE = "t5x_finetune"


def run(flags: Any) -> int:
    """Trains, or prints the configuration on request."""
    from trainer import training
    from trainer.config import from_flags
    from trainer.config.optimizer import recipe

    source = flags.run.values.get("init_from")
    if not source:
        raise UserError(
            "--init_from is missing: name a run, a checkpoint, or hf:DIR of transformers"
        )
    values = {
        **recipe(flags.optimizer_preset or _RECIPE),
        # Source: Raffel et al. 2020 (arXiv:1910.10683), section 3.1.2.
        "model.dropout_rate": 0.1,
        "init_from": source,
        "init_from_state": False,
    }
    settings = from_flags.Settings("fine-tuning", values)
    return training.start(*from_flags.configured(flags, settings), flags.print_config)


main = Command("trainer.config.from_flags:RunFlags", run, at_once="run the same command to resume")

if __name__ == "__main__":
    main.start()
