"""Exports a checkpoint to Hugging Face transformers.

    python -m trainer.export --model_dir=DIR --output=FOLDER [--step=N] [--custom_code]

The folder gets its name only after transformers has loaded it and computed the trainer's logits for
rows of the validation split.
"""

import dataclasses
import sys

from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, field
from trainer.config import averages

_EXIT_NOT_EQUAL = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Card:
    """Facts for the model card that only the user can supply."""

    license: str = field("", "licence of the weights, such as apache-2.0")
    language: tuple[str, ...] = field((), "languages of the corpus, such as en,ro")
    datasets: tuple[str, ...] = field(
        (), "the corpus's data sets on the Hub; by default, the ones that hf: corpora name"
    )
    base_model: str = field("", "model on the Hub from which training started")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    model_dir: str = field(REQUIRED, "folder of the run, local or remote", bare=True)
    output: str = field(REQUIRED, "local folder to write, which must not exist")
    step: int | None = field(None, "step of the checkpoint; None: the newest", aliases=("steps",))
    average: str | None = field(None, **averages.OF_COMMANDS)
    max_shard_size: str = field("5GB", "largest size of a weights file, such as 5GB")
    vocabulary: str | None = field(None, "folder or file of the vocabulary; None: the cache's")
    cache_dir: str | None = field(None, "folder of the tasks' caches, if they have moved")
    custom_code: bool = field(
        False, "write a modelling file for a model that transformers does not have"
    )
    push_to: str | None = field(
        None,
        "upload the folder to this repository on the Hub, to main and to branch step_N, with the "
        "token in HF_TOKEN; an existing export is uploaded as it is",
        metavar="OWNER/NAME",
    )
    card: Card = field(Card, "the model card", flat=True)
    notes: str | None = field(None, "Markdown file that ends the model card", metavar="FILE")


def run(flags: Flags) -> int:
    """Exports; returns 1 if transformers computes different results."""
    from trainer.exporting import exporting

    if flags.push_to:
        exporting.check_push(flags.push_to)
        made = exporting.is_made(
            flags.model_dir, flags.output, flags.step, flags.vocabulary, flags.average
        )
        if made is not None:
            print(f"{flags.output}: step {made:,} is there already")
            exporting.push(flags.push_to, flags.model_dir, made, flags.output)
            return 0
    try:
        step, parity, match = exporting.export(
            flags.model_dir,
            flags.output,
            flags.step,
            average=flags.average,
            cache_dir=flags.cache_dir,
            vocabulary_path=flags.vocabulary,
            max_shard_size=flags.max_shard_size,
            custom_code=flags.custom_code,
            facts=dataclasses.asdict(flags.card),
            notes=flags.notes,
        )
    except exporting.NotEqual as error:
        print(f"trainer.export: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    print(f"{flags.output}: step {step:,}")
    print(f"model      {parity}")
    print(f"tokenizer  {exporting.compared(match)}")
    if flags.push_to:
        exporting.push(flags.push_to, flags.model_dir, step, flags.output)
    return 0


main = Command(Flags, run, at_once="run the same command again", terminated=True)

if __name__ == "__main__":
    main.start()
