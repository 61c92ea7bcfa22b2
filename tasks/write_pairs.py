"""Writes the rows of a data set as pairs of texts, for pipeline.build.

python -m tasks.write_pairs --task=glue_cola --input=train.parquet --output=train.jsonl
"""

import sys

from tasks.supervised import table
from tasks.supervised.rows import write_pairs
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m tasks.write_pairs", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--task", required=True, help=f"one of {', '.join(table.TASKS)}")
    add("--input", required=True, help="rows: a Parquet file or JSON lines, with the Hub's columns")
    add("--output", required=True, help="JSON lines of {inputs, targets} to write")
    add(
        "--evaluating",
        action="store_true",
        help="the rows are for evaluation: one example of each, also of those not trained on",
    )
    arguments = parser.parse_args(argv)
    task = table.get(arguments.task)
    count = write_pairs(task, arguments.input, arguments.output, arguments.evaluating)
    print(f"{arguments.output}: {count:,} pairs of {task.name}; metrics {', '.join(task.metrics)}")


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
