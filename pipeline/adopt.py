"""Indexes a cache of seqio or a data set of Megatron, so that the trainer reads it where it is.

    python -m pipeline.adopt --cache_dir=CACHES/TASK --vocabulary=DIR [--extra_ids=100]

Every record is read once and checked. A row index of each file, 20 bytes a row, and a manifest with
checksums are added to the folder or, with --index_dir, written to another; no file of the cache is
copied or changed. Rerun the same command to resume.
"""

from tasks.terminal.command_line import Parser, run
from tasks.terminal.dataclass_flags import add_flags
from tasks.terminal.table import table


def main(argv: list[str]) -> None:
    """Runs the command."""
    from pipeline.adopting.options import Options

    parser = Parser(prog="python -m pipeline.adopt", description=__doc__.splitlines()[0])
    add_flags(parser, Options)
    options = Options(**vars(parser.parse_args(argv)))

    from pipeline.adopting import engine

    found, manifest = engine.adopt(options)
    columns = ("rows", "tokens")
    rows = [
        (split, f"{len(shards):,}", *(f"{manifest.total(split, name):,}" for name in columns))
        for split, shards in manifest.splits.items()
    ]
    print(table(("", "files", *columns), rows))
    for line in engine.summary(found, manifest):
        print(line)
    print(f"{options.index_dir or options.cache_dir}: adopted")


if __name__ == "__main__":
    run(main)
