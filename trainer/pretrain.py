"""Pretrains a model.

python -m trainer.pretrain --preset=t5_1_1_small --task=rlm_span_corruption \\
        --cache_dir=DIR --model_dir=DIR [--train_steps=N] [--field.path=value]
palimpsest pretrain --corpus=SPEC … also builds the cache, and trains meanwhile
"""

from typing import Any

from tasks.terminal.command import Command


def run(flags: Any) -> int:
    """Trains, or prints the configuration on request; `flags` may be a `Config` made by code."""
    from trainer import training
    from trainer.config import Config, from_flags

    if isinstance(flags, Config):
        return training.start(flags, from_flags.origins_of(flags))
    return training.start(*from_flags.configured(flags), flags.print_config)


main = Command(
    "trainer.config.from_flags:OpenRunFlags", run, at_once="run the same command to resume"
)

if __name__ == "__main__":
    main.start()
