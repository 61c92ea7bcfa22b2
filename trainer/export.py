"""Exports a checkpoint to Hugging Face transformers, and compares its logits there.

python -m trainer.export --model_dir=DIR --output=FOLDER [--step=N] [--custom_code]

Writes a temporary folder. Transformers loads it and computes logits of rows of the validation
split; only if they equal the trainer's is the folder renamed to FOLDER.
"""

from __future__ import annotations

from tasks.terminal import interrupt

if __name__ == "__main__":
    interrupt.end_at_once(  # also while the rest is imported
        "python -m trainer.export", "run the same command again", terminated=True
    )

import argparse
import sys
from typing import TYPE_CHECKING

from tasks.terminal import command_line
from tasks.terminal.command_line import Parser

if TYPE_CHECKING:
    from trainer.conversion.card import Named

_EXIT_NOT_EQUAL = 1


def _named(flags: argparse.Namespace) -> Named:
    from trainer.conversion.card import Named

    return Named(
        flags.license,
        tuple(filter(None, flags.language.split(","))),
        tuple(filter(None, flags.datasets.split(","))),
        flags.base_model,
    )


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if transformers computes something different."""
    parser = Parser(prog="python -m trainer.export", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model_dir", required=True, help="folder of the run, local or remote")
    add("--output", required=True, help="local folder to write, which must not exist")
    add("--step", type=int, help="step of the checkpoint; the newest if left out")
    add("--max_shard_size", default="5GB", help="largest size of a weights file, as 5GB or 300MB")
    add("--vocabulary", help="folder or file of the vocabulary; the cache's if left out")
    add("--cache_dir", help="folder of caches by task, if they were moved after training")
    add(
        "--custom_code",
        action="store_true",
        help="write a modelling file for a model that transformers does not have",
    )
    add(
        "--push_to",
        metavar="OWNER/NAME",
        help="upload the folder to this repository of the Hub, as main and as a branch step_N; the "
        "token is HF_TOKEN's; a folder that was exported before is uploaded as it is",
    )
    card = parser.add_argument_group("the model card")
    card.add_argument("--license", default="", help="license of the weights, as apache-2.0")
    card.add_argument(
        "--language", default="", metavar="A,B", help="languages of the corpus, as en,ro"
    )
    card.add_argument(
        "--datasets",
        default="",
        metavar="A,B",
        help="data sets of the Hub that the corpus comes from; those of hf: corpora if left out",
    )
    card.add_argument(
        "--base_model", default="", help="model of the Hub that the training started from"
    )
    flags = parser.parse_args(argv)

    from trainer.conversion import exporting

    if flags.push_to:
        exporting.check_push(flags.push_to)
        made = exporting.is_made(flags.model_dir, flags.output, flags.step, flags.vocabulary)
        if made is not None:
            print(f"{flags.output}: step {made:,} is there already")
            exporting.push(flags.push_to, flags.model_dir, made, flags.output)
            return 0
    try:
        step, parity, match = exporting.export(
            flags.model_dir,
            flags.output,
            flags.step,
            cache_dir=flags.cache_dir,
            vocabulary_path=flags.vocabulary,
            max_shard_size=flags.max_shard_size,
            custom_code=flags.custom_code,
            named=_named(flags),
        )
    except exporting.NotEqual as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    print(f"{flags.output}: step {step:,}")
    print(f"model      {parity}")
    print(f"tokenizer  {exporting.compared(match)}")
    if flags.push_to:
        exporting.push(flags.push_to, flags.model_dir, step, flags.output)
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
