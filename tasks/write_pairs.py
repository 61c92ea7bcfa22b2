"""Writes the rows of a data set as pairs of texts, for pipeline.build.

python -m tasks.write_pairs --task=glue_cola --input=train.parquet --output=train.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tasks.storage import files
from tasks.supervised import table
from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError


def main(argv: list[str]) -> None:
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
    count = 0
    try:
        with files.atomic_write(arguments.output) as file:
            for pair in task.examples(_rows(arguments.input), arguments.evaluating):
                file.write(json.dumps(pair, ensure_ascii=False).encode() + b"\n")
                count += 1
            if not count:
                raise UserError(f"--input={arguments.input} has no rows that make pairs")
    except (LookupError, TypeError) as error:
        raise UserError(
            f"--input={arguments.input}: {task.name} needs the columns of {task.source} on the Hub "
            f"and its labels ({error!r} is missing or of another type)"
        ) from error
    print(f"{arguments.output}: {count:,} pairs of {task.name}; metrics {', '.join(task.metrics)}")


def _rows(path: str) -> Iterator[dict[str, Any]]:
    if not files.exists(path):
        raise UserError(f"--input={path}: no such file")
    if path.endswith(".parquet"):
        import pyarrow.parquet as parquet

        with files.open_read(path) as file:
            for batch in parquet.ParquetFile(file).iter_batches():
                yield from batch.to_pylist()
        return
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UserError(f"--input={path}, line {number}: this is not JSON") from error


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
