"""Indexes a seqio cache or a Megatron data set in place.

    palimpsest adopt --cache_dir=CACHES/TASK --vocabulary=DIR [--extra_ids=100]

Every record is read once and checked. A row index of each file, 20 bytes per row, and a manifest
with checksums are added to the folder or, with --index_dir, written there; no file of the
cache is copied or changed. Rerun the same command to resume.
"""

from pipeline.annexes.adopting.options import Options
from tasks.terminal.command import Command
from tasks.terminal.table import table


def run(options: Options) -> None:
    """Indexes the cache and prints what it holds."""
    from pipeline.annexes.adopting import engine

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


main = Command(Options, run)

if __name__ == "__main__":
    main.start()
