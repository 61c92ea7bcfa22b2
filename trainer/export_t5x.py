"""Writes a checkpoint that T5X can restore.

python -m trainer.export_t5x --model_dir=DIR --output=DIR [--step=N] [--scan_layers]
"""

import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from trainer.config import load_config


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m trainer.export_t5x",
        description="Writes OUTPUT/checkpoint_STEP in T5X's format: parameters, Adafactor's state "
        "and the step. T5X can restore it, or resume from it if OUTPUT is its MODEL_DIR.",
    )
    add = parser.add_argument
    add("--model_dir", required=True, help="folder of the run, local or remote")
    add("--step", type=int, help="step of the checkpoint; the newest if left out")
    add("--output", required=True, help="folder to write checkpoint_STEP into, local or remote")
    add(
        "--scan_layers",
        action="store_true",
        help="write the layout of T5X's examples/scalable_t5, which joins the layers of a stack",
    )
    arguments = parser.parse_args(argv)
    config, _ = load_config(arguments.model_dir)

    from trainer.t5x import read, write

    path = arguments.model_dir
    if arguments.step is not None:
        found = read.steps(path)
        if arguments.step not in found:
            raise UserError(
                f"{path} has no checkpoint of step {arguments.step}; it has "
                f"{', '.join(map(str, found)) or 'none'}"
            )
        path = files.join(path, f"checkpoint_{arguments.step}")
    checkpoint = read.load(path)
    written = write.write(checkpoint, config, arguments.output, arguments.scan_layers)
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
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
