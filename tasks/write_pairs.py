"""Writes the rows of a data set as pairs of texts.

python -m tasks.write_pairs --task=glue_cola --input=train.parquet --output=train.jsonl
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from tasks.storage import files
from tasks.supervised import table
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.fields import REQUIRED, field


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
        "the rows are for evaluation: write one example of each, also of those not trained on",
    )


def run(flags: Flags) -> None:
    """Writes the pairs."""
    task = table.get(flags.task)
    count = 0
    try:
        with files.atomic_write(flags.output) as file:
            for pair in task.examples(_rows(flags.input), flags.evaluating):
                file.write(json.dumps(pair, ensure_ascii=False).encode() + b"\n")
                count += 1
            if not count:
                raise UserError(f"--input={flags.input} has no rows that make pairs")
    except (LookupError, TypeError) as error:
        raise UserError(
            f"--input={flags.input}: {task.name} needs the columns of {task.source} on the Hub "
            f"and its labels ({error!r} is missing or of another type)"
        ) from error
    print(f"{flags.output}: {count:,} pairs of {task.name}; metrics {', '.join(task.metrics)}")


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


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
