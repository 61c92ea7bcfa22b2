"""Writes the rows of a data set as pairs of texts.

    palimpsest write_pairs --task=glue_cola --input=train.parquet --output=train.jsonl

pipeline.build reads them.
"""

import dataclasses

from tasks.annexes.t5_tasks import table
from tasks.annexes.t5_tasks.rows import write_pairs
from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, field


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    task: str = field(REQUIRED, f"one of {', '.join(table.TASKS)}", metavar="NAME")
    input: str = field(
        REQUIRED, "rows: a Parquet file or JSON lines, with the Hub's columns", metavar="FILE"
    )
    output: str = field(REQUIRED, "JSON lines of {inputs, targets} to write", metavar="FILE")
    evaluating: bool = field(
        False,
        "the rows are for evaluation: write one example per row, even if it is not trained on",
    )


def run(flags: Flags) -> None:
    """Writes the pairs."""
    task = table.get(flags.task)
    count = write_pairs(task, flags.input, flags.output, flags.evaluating)
    print(f"{flags.output}: {count:,} pairs of {task.name}; metrics {', '.join(task.metrics)}")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
