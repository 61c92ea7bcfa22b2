"""Builds a task's cache from its corpus.

    python -m pipeline.build --task=python_docs_span_corruption --vocabulary=DIR --cache_dir=DIR

Rerun the same command to resume. The cache is written to CACHE_DIR/TASK, where stock seqio looks
for it. Its bytes depend only on the corpus, the vocabulary and the packing, not on the workers, the
runner or interruptions. A --runner has flags of its own (docs/engines.md). Each of several
languages gets its own cache; together they are a task for the trainer.
"""

from pipeline.building.options import Options
from pipeline.runners import engines
from tasks.terminal.command import Command


def run(options: Options) -> None:
    """Runs the job; raises as `pipeline.building.languages.build` does."""
    runner = engines.chosen(options)

    from pipeline.building import languages

    languages.build(options, runner)


main = Command(Options, run)

if __name__ == "__main__":
    main.start()
