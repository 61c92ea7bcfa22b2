"""The command that writes a checkpoint for T5X.

python -m trainer.export_t5x --model_dir=DIR --output=DIR [--step=N] [--scan_layers]
"""

import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser
from trainer.config import load_config


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="python -m trainer.export_t5x",
        description="Writes OUTPUT/checkpoint_STEP as T5X writes it: parameters, Adafactor's state "
        "and the step. T5X restores it, or goes on from it where OUTPUT is its MODEL_DIR.",
    )
    parser.add_argument("--model_dir", required=True, help="of the run")
    parser.add_argument("--step", type=int, help="which of its checkpoints; the newest if left out")
    parser.add_argument("--output", required=True, help="folder, local or on a bucket")
    parser.add_argument(
        "--scan_layers",
        action="store_true",
        help="for T5X's examples/scalable_t5, which joins the layers of a stack",
    )
    arguments = parser.parse_args(argv)
    config, _ = load_config(arguments.model_dir)

    from trainer.t5x import read, write

    path = arguments.model_dir
    if arguments.step is not None:
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
            f"its optimizer was {config.optimizer.name}: T5X's Adafactor begins with moments of 0, "
            f"so set adafactor.Adafactor.step_offset = {checkpoint.step}"
        )
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
