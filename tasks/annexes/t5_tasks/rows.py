"""Reads rows of a data set, and writes the pairs that a task makes from them."""

import json
from collections.abc import Iterator
from typing import Any

from tasks.annexes.t5_tasks.template import Supervised
from tasks.storage import files
from tasks.terminal.command_line import UserError


def write_pairs(task: Supervised, source: str, output: str, evaluating: bool) -> int:
    """Writes the pairs of a file's rows as JSON lines; returns their number.

    `source` is a Parquet file or JSON lines, with the columns used on the Hub. When `evaluating`,
    every row makes one pair, even if it is not trained on. Raises UserError if no row makes a pair.
    """
    count = 0
    try:
        with files.atomic_write(output) as file:
            for pair in task.examples(read_rows(source), evaluating):
                file.write(json.dumps(pair, ensure_ascii=False).encode() + b"\n")
                count += 1
            if not count:
                raise UserError(f"--input={source} has no rows that make pairs")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--input={source}: {task.name} needs the columns of {task.source} on the Hub "
            f"and its labels ({error!r} is missing or has the wrong type)"
        ) from error
    return count


def read_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a Parquet file or of JSON lines; raises UserError if unreadable."""
    if not files.exists(path):
        raise UserError(f"--input={path}: no such file")
    if path.endswith(".parquet"):
        import pyarrow as pa
        import pyarrow.parquet as parquet

        with files.open_read(path) as file:
            try:
                for batch in parquet.ParquetFile(file).iter_batches():
                    yield from batch.to_pylist()
            except pa.ArrowException as error:
                raise UserError(f"--input={path}: this is not Parquet: {error}") from error
        return
    for number, line in enumerate(files.read_lines(path), 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UserError(f"--input={path}, line {number}: this is not JSON") from error
