"""Builds a task's cache from its corpus.

    python -m pipeline.build --task=python_docs_span_corruption --vocabulary=DIR --cache_dir=DIR

Rerun the same command to resume. The cache is written to CACHE_DIR/TASK, where stock seqio looks
for it. Its bytes depend only on the corpus, the vocabulary and the packing, not on the workers, the
runner or interruptions. All further flags are passed to Beam (--runner=DataflowRunner --project=...
and so on). Each of several languages gets its own cache; together they are one task of the trainer.
"""

import dataclasses

from pipeline.building.options import Options
from pipeline.runners import beam_options
from pipeline.runners.interruption import interruptible
from tasks.terminal.command import Command
from tasks.terminal.fields import field


@dataclasses.dataclass(frozen=True)
class Flags(Options):
    """The command's own flags, and Beam's."""

    beam: tuple[str, ...] = field((), "Beam's flags", rest=beam_options.refuse_unknown)


def run(flags: Flags) -> None:
    """Runs the Beam job; raises as `pipeline.building.languages.build` does."""
    with interruptible():
        arguments = beam_options.arguments(flags)

        from pipeline.building import languages

        languages.build(flags, arguments)


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
