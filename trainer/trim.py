"""Cuts a model and its vocabulary to the pieces that a corpus needs, as mT5 to one language.

    python -m trainer.trim --from=mt5-small --corpus='parquet:ro/*.parquet' --to=mt5-small-ro

Rows of kept pieces stay, in the embedding and in the logits, and so do all other parameters: logits
of kept pieces are those of the source. What is written is checked as by trainer.convert.
"""

from __future__ import annotations

from tasks.terminal import interrupt

if __name__ == "__main__":
    interrupt.end_at_once(  # also while the rest is imported
        "python -m trainer.trim", "run the same command again", terminated=True
    )

import os
import sys

from tasks.storage import files
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError, positive

_FORMATS = ("huggingface", "t5x", "palimpsest")
_EXIT_NOT_EQUAL = 1


def _parser() -> Parser:
    parser = Parser(prog="python -m trainer.trim", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--from",
        dest="source",
        required=True,
        metavar="PATH",
        help="the model, as trainer.convert takes it: a folder of transformers, a checkpoint of "
        "this trainer or of T5X, or a folder of them, of which the newest is taken",
    )
    add("--corpus", required=True, metavar="SPEC", help="text that the model is to keep")
    add("--to", required=True, metavar="FOLDER", help="local folder to write")
    add(
        "--format",
        choices=_FORMATS,
        help="what to write; huggingface if that is the source, else palimpsest",
    )
    add("--min_count", type=positive, default=1, help="least occurrences of a kept piece")
    add("--vocab_size", type=positive, help="most pieces, without sentinels; no limit if left out")
    add("--workers", type=positive, default=1, help="processes that count pieces")
    add("--vocabulary", metavar="PATH", help="the vocabulary, where the source does not have it")
    add("--extra_ids", type=int, metavar="N", help="sentinels beyond its pieces; T5: 100")
    add("--preset", metavar="NAME", help="the model of a checkpoint of T5X, as mt5_base")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if what was written computes something different."""
    flags = _parser().parse_args(argv)
    if flags.extra_ids is not None and not flags.vocabulary:
        raise UserError("--extra_ids has no effect without --vocabulary")
    if files.is_remote(flags.to):
        raise UserError(f"--to={flags.to}: give a local folder")

    from trainer.conversion import converting, sources, targets, trimming
    from trainer.conversion.verify import NotEqual

    given = sources.Given(flags.preset)
    opened = sources.opened(sources.find(flags.source)[0][-1], given)
    own = targets.HUGGING_FACE if opened.source.transformers else targets.OURS
    settings = targets.Settings(flags.format or own)
    target = os.path.abspath(files.local_path(flags.to))
    try:
        made, settings = trimming.cut(flags, opened, settings)
        converting.write(made, target, settings.format != targets.HUGGING_FACE, settings)
    except NotEqual as error:
        print(f"python -m trainer.trim: {error}", file=sys.stderr)
        return _EXIT_NOT_EQUAL
    return 0


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
