"""Writes pairs of phrases to train on: without and with their diacritics, capitals or spaces.

    python -m experiments.pairs --corpus='parquet:DATA/ro_*.parquet' --undo=diacritics --output=DIR

Writes train.jsonl and validation.jsonl of {"inputs", "targets"}; no text is in both. Prints the
character error rate of returning the inputs.
"""

import dataclasses
import json
import unicodedata
from collections.abc import Callable, Iterator, Mapping

from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field


def without_diacritics(text: str) -> str:
    """Removes diacritics; returns NFC."""
    parts = unicodedata.normalize("NFD", text)
    left = "".join(part for part in parts if not unicodedata.combining(part))
    return unicodedata.normalize("NFC", left)


def without_spaces(text: str) -> str:
    """Removes spaces."""
    return text.replace(" ", "")


LOSSES: Mapping[str, Callable[[str], str]] = {
    "diacritics": without_diacritics,
    "case": str.lower,
    "spaces": without_spaces,
}
# Ends the message about a split without phrases.
_IF_EMPTY = {
    "validation": "; give more text, or hold out more with &validation=0.1",
    "train": " and is not held out; give more text",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    corpus: str = field(REQUIRED, "texts, as in pipeline.build", metavar="SPEC")
    undo: str = field("diacritics", "what to remove from the inputs", choices=tuple(LOSSES))
    words: int = field(
        2, "words of a phrase, at least one with something to lose", rule=at_least(1)
    )
    output: str = field(REQUIRED, "folder for the pairs", metavar="DIR")


def run(flags: Flags) -> None:
    """Writes the pairs for both splits of a corpus unless they already exist."""
    if files.exists(path := files.join(flags.output, "train.jsonl")):
        print(f"{path} exists and is kept: to write others, name another --output")
        return
    from tasks.metrics import metric
    from tasks.reading import sources

    (error_rate,) = metric.chosen(["character_error_rate"])
    lose = LOSSES[flags.undo]
    by_split: dict[str, dict[str, None]] = {"validation": {}, "train": {}}
    for split, row in sources.documents(flags.corpus):
        if "text" not in row:
            raise UserError(f"--corpus={flags.corpus} has pairs: leave out inputs= and targets=")
        by_split[split].update(dict.fromkeys(_phrases(row["text"], lose, flags.words)))
    for phrase in by_split["validation"]:
        by_split["train"].pop(phrase, None)
    for split, phrases in by_split.items():
        if not phrases:
            raise UserError(
                f"--corpus={flags.corpus}: its {split} split has no phrase of {flags.words} words "
                f"that loses its {flags.undo}{_IF_EMPTY[split]}"
            )
    files.make_folder(flags.output)
    for split, phrases in by_split.items():
        lines = (
            json.dumps({"inputs": lose(text), "targets": text}, ensure_ascii=False) + "\n"
            for text in phrases
        )
        files.write_bytes(files.join(flags.output, f"{split}.jsonl"), "".join(lines).encode())
    held_out = [*by_split["validation"]]
    (rate,) = error_rate(held_out, [*map(lose, held_out)]).values()
    whose = f"the inputs of all {len(held_out):,} pairs held out"
    print(f"{flags.output}: {whose}, as they are, have a character error rate of {rate:.1f} %")


def _phrases(text: str, lose: Callable[[str], str], count: int) -> Iterator[str]:
    words = unicodedata.normalize("NFC", text).split()
    for first in range(0, len(words) - count + 1, count):
        phrase = " ".join(words[first : first + count])
        if lose(phrase) != phrase:
            yield phrase


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
