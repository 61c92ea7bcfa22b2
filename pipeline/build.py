"""Builds a task's cache from its corpus. Rerun the same command to resume.

    python -m pipeline.build --task=python_docs_span_corruption --vocabulary=DIR --cache_dir=DIR

The cache is written to CACHE_DIR/TASK, where stock seqio looks for it. Its bytes depend only on the
corpus, the vocabulary and the packing, not on the workers, the runner or interruptions. All further
flags are Beam's own (--runner=DataflowRunner --project=... and so on). Of several languages, each
gets a cache of its own, and all of them are one task of the trainer.
"""

from pipeline.runners.interruption import interruptible
from tasks.terminal.command_line import Parser, run


def command_line() -> Parser:
    """Returns the parser of the command's own flags."""
    from pipeline.building.options import Options
    from tasks.terminal.dataclass_flags import add_flags

    parser = Parser(prog="python -m pipeline.build", description=__doc__.splitlines()[0])
    add_flags(parser, Options)
    return parser


def main(argv: list[str]) -> None:
    """Parses the flags and builds; raises as `pipeline.building.languages.build` does."""
    with interruptible():
        from pipeline.runners import beam_options

        known, arguments = beam_options.parsed(command_line(), argv)

        from pipeline.building import languages
        from pipeline.building.options import Options

        languages.build(Options(**known), arguments)


if __name__ == "__main__":
    run(main)
