"""Writes a checkpoint that T5X can restore.

    palimpsest export_t5x --model_dir=DIR --output=DIR [--step=N] [--scan_layers]

OUTPUT/checkpoint_STEP has parameters, Adafactor's state and the step in T5X's format. T5X can
restore it, or resume from it if OUTPUT is its MODEL_DIR.
"""

import dataclasses

from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    model_dir: str = field(REQUIRED, "folder of the run, local or remote", bare=True)
    step: int | None = field(None, "step of the checkpoint; None: the newest", aliases=("steps",))
    output: str = field(REQUIRED, "folder in which to write checkpoint_STEP, local or remote")
    scan_layers: bool = field(
        False, "write the layout of T5X's examples/scalable_t5, which joins the layers of a stack"
    )


def run(flags: Flags) -> None:
    """Writes the checkpoint and prints what it holds."""
    from trainer.annexes.t5x import write
    from trainer.checkpoints import metadata, stored
    from trainer.config import load_config

    metadata.check_folder(flags.output, "--output")
    path = flags.model_dir
    config, _ = load_config(path)
    if flags.step is not None:
        path = stored.chosen(path, flags.step)
    checkpoint = stored.load(path)
    written = write.write(checkpoint, config, flags.output, flags.scan_layers)
    model = config.model
    print(
        f"{written}: {len(checkpoint.parameters)} parameters of {config.preset}, vocabulary of "
        f"{model.vocab_size} rows, after step {checkpoint.step}"
    )
    if not write.has_moments(checkpoint):
        print(
            f"the run's optimizer was {config.optimizer.name}: T5X's Adafactor starts with moments "
            f"of 0, so set adafactor.Adafactor.step_offset = {checkpoint.step}"
        )


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
