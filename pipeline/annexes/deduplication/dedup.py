"""Finds duplicates and contamination in a corpus.

    palimpsest dedup --corpus='parquet:data/*.parquet' --output=duplicates --workers=8
    python -m pipeline.build … --exclude=duplicates/exclude.arrow

Writes an exclude list for pipeline.build, of one corpus or of several that are compared with each
other. Exact duplicates are equal except for case and white
space. Near duplicates share a band of MinHash values of word shingles. With --against, units that
share n-grams with evaluation sets are listed as well. The list depends only on the corpus and the
flags that describe duplicates, not on the workers, the runner or interruptions: rerun the same
command to resume. A --runner has flags of its own (docs/engines.md).
"""

from pipeline.annexes.deduplication.options import Options
from pipeline.runners import engines
from tasks.terminal.command import Command


def run(options: Options) -> None:
    """Runs the jobs; raises as `pipeline.annexes.deduplication.engine.search` does."""
    runner = engines.chosen(options)

    from pipeline.annexes.deduplication import engine

    engine.search(options, runner)


main = Command(Options, run)

if __name__ == "__main__":
    main.start()
