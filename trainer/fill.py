"""Fills the gaps of a text, marked <extra_id_0>, <extra_id_1>, …, by a checkpoint of a run.

python -m trainer.fill "The <extra_id_0> returns <extra_id_1>." --model_dir=DIR

Prints the text with what the model puts into each gap in brackets. A UL2 model also reads the mode
with which its inputs begin.
"""

from __future__ import annotations

import sys

from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError
from tasks.terminal.dataclass_flags import add_flags, options_of
from tasks.vocabulary import sentinel_piece
from trainer.config.decoding import Decoding
from trainer.generate import add_run_flags, generator_of


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m trainer.fill", description=__doc__.splitlines()[0])
    parser.add_argument("text", help="text with gaps, as 'The <extra_id_0> returns.'")
    add_run_flags(parser)
    add_flags(parser.add_argument_group("decoding"), Decoding)
    flags = parser.parse_args(argv)
    decoding = options_of(flags, Decoding)

    from trainer.decoding import text

    gaps = text.sentinels(flags.text)
    if not gaps:
        raise UserError(f"{flags.text!r} has no gap: mark one by <extra_id_0>")
    generator = generator_of(flags, decoding)
    for found in generator([generator.ids(flags.text)]):
        spans = text.spans(generator.vocabulary, found.ids)
        print(text.filled(flags.text, spans))
        missing = [sentinel_piece(gap) for gap in dict.fromkeys(gaps) if gap not in spans]
        if missing := [piece for piece in missing if piece not in generator.modes]:
            print(f"the model left out {', '.join(missing)}", file=sys.stderr)


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
