"""Fills the gaps of a text.

    python -m trainer.fill "The <extra_id_0> returns <extra_id_1>." --model_dir=DIR

Prints the text with the model's words for each gap in brackets. A UL2 model also reads the mode at
the beginning of its inputs.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import REQUIRED, field
from tasks.vocabulary import sentinel_piece
from trainer.config.decoding import Decoding, TrainedFlags

if TYPE_CHECKING:
    from trainer.trained.generator import Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(TrainedFlags):
    """Flags of the command."""

    text: str = field(REQUIRED, "text with gaps: 'The <extra_id_0> returns.'", positional=True)
    decoding: Decoding = field(Decoding, "how tokens are chosen", flat=True)


def filled(flags: Flags, opened: "Callable[[Flags], Generator]") -> Iterator[str]:
    """Yields the filled texts by the generator that `opened` returns; notes gaps without words."""
    from trainer.trained import text

    gaps = text.sentinels(flags.text)
    if not gaps:
        raise UserError(f"{flags.text!r} has no gap: mark one with <extra_id_0>")
    generator = opened(flags)
    for found in generator([generator.ids(flags.text)]):
        spans = text.spans(generator.vocabulary, found.ids)
        yield text.filled(flags.text, spans)
        missing = [sentinel_piece(gap) for gap in dict.fromkeys(gaps) if gap not in spans]
        if missing := [piece for piece in missing if piece not in generator.modes]:
            print(f"the model left out {', '.join(missing)}", file=sys.stderr)


def run(flags: Flags) -> None:
    """Prints the filled text."""
    from trainer.trained import prompts

    for text in filled(flags, lambda flags: prompts.generator_of(flags, flags.decoding)):
        print(text)


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
