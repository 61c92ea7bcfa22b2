"""Finds duplicates and contamination in a corpus; writes an exclude list for pipeline.build.

    python -m pipeline.dedup --corpus='parquet:data/*.parquet' --output=duplicates --workers=8
    python -m pipeline.build … --exclude=duplicates/exclude.arrow

Exact duplicates are equal but for case and white space. Near duplicates share a band of MinHash
values of word shingles. With --against, units that share n-grams with evaluation sets are listed as
well. The list depends only on the corpus and the flags that describe duplicates, not on the
workers, the runner or interruptions: rerun the same command to resume. All further flags are Beam's
own (--runner=DataflowRunner --project=... and so on).
"""

from pipeline.runners.interruption import interruptible
from tasks.terminal.command_line import Parser, run


def command_line() -> Parser:
    """Returns the parser of the command's own flags."""
    from pipeline.deduplication.options import Options
    from tasks.terminal.dataclass_flags import add_flags

    parser = Parser(prog="python -m pipeline.dedup", description=__doc__.splitlines()[0])
    add_flags(parser, Options)
    return parser


def main(argv: list[str]) -> None:
    """Parses the flags and searches; raises as `pipeline.deduplication.engine.search` does."""
    with interruptible():
        from pipeline.runners import beam_options

        known, arguments = beam_options.parsed(command_line(), argv)

        from pipeline.deduplication import engine
        from pipeline.deduplication.options import Options

        engine.search(Options(**known), arguments)


if __name__ == "__main__":
    run(main)
