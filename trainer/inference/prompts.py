"""Reads files of prompts, and writes files of results that a killed command can continue."""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from tasks import registry
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from trainer.config.decoding import Decoding, TrainedFlags
from trainer.engine import processes
from trainer.inference.generator import Generator

# Batches between two writes; a killed command loses at most this many.
_BATCHES = 8
_SETTINGS = "settings.json"


def generator_of(flags: TrainedFlags, decoding: Decoding, end: str | None = None) -> Generator:
    """Returns the generator that the flags name, see there; notes on stderr if it has no cache."""
    if flags.task_module:
        registry.load(flags.task_module)
    place = flags.step, flags.cache_dir, flags.vocabulary, flags.average
    made = Generator(flags.model_dir, decoding, *place, end=end)
    if made.decoder.without_cache and processes.is_first():
        print(
            f"note: no cache: {made.decoder.without_cache} cannot keep keys and values, so the "
            "whole row is computed for every token",
            file=sys.stderr,
        )
    return made


def read_prompts(path: str, column: str) -> list[str]:
    """Returns the prompts in a file: its lines or, for JSON lines, the texts in `column`."""
    try:
        lines = list(files.read_lines(path))
    except FileNotFoundError as error:
        raise UserError(f"--input={path} does not exist") from error
    if not lines:
        raise UserError(f"--input={path} is empty")
    if not path.endswith((".jsonl", ".json")):
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        place = f"--input={path}, line {number}"
        try:
            prompts.append(json.loads(line)[column])
            if not isinstance(prompts[-1], str):
                raise UserError(f"{place}: {column!r} is not a string")
            prompts[-1].encode()
        except UnicodeEncodeError as error:
            character = error.object[error.start]
            raise UserError(f"{place}: {column!r} has half a character, {character!r}") from error
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{place}: no JSON object with {column!r}; name the prompts' field with --column"
            ) from error
    return prompts


def results(
    generator: Generator, prompts: Sequence[str], first: int, count: int
) -> list[list[dict[str, Any]]]:
    """Returns `count` results of each prompt, the first of which has number `first`."""
    ids = [generator.ids(prompt) for prompt in prompts]
    made = [
        {
            "text": generator.text(each.ids),
            "ids": each.ids.tolist(),
            # Sums of float32 differ in their last digits between machines.
            "score": round(each.score, 4),
            "ended": each.ended,
        }
        for each in generator(ids, range(first, first + len(prompts)))
    ]
    return [made[start : start + count] for start in range(0, len(made), count)]


def _lines(prompts: list[str], found: list[list[dict[str, Any]]]) -> list[str]:
    """Returns a JSON line for each prompt."""
    rows = (
        {"prompt": prompt, "results": made} for prompt, made in zip(prompts, found, strict=True)
    )
    return [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]


class _Output:
    """A file of lines, kept as a folder of blocks until complete so that a rerun can continue."""

    def __init__(self, path: str, settings: dict[str, Any]):
        if files.exists(path):
            raise UserError(f"--output={path} exists: name another file, or delete it")
        self._path, self._partial = path, f"{path}.partial"
        self._settings = settings

    def begin(self) -> int:
        """Returns the number of finished blocks."""
        files.make_folder(self._partial)
        files.remove_partial(self._partial)
        names, place = files.list_names(self._partial), files.join(self._partial, _SETTINGS)
        if _SETTINGS not in names:
            files.write_json(place, self._settings)
        elif files.read_json(place) != self._settings:
            raise UserError(
                f"{self._partial} was written by a different command: delete it, or name "
                "another --output"
            )
        return next(block for block in itertools.count() if _name(block) not in names)

    def add(self, block: int, lines: list[str]) -> None:
        """Writes the lines of a block, which then survive a kill."""
        files.write_bytes(files.join(self._partial, _name(block)), "".join(lines).encode())

    def end(self, blocks: int) -> None:
        """Joins the blocks into the final file."""
        with files.atomic_write(self._path) as whole:
            for block in range(blocks):
                with files.open_read(files.join(self._partial, _name(block))) as part:
                    shutil.copyfileobj(part, whole)
        for name in files.list_names(self._partial):
            files.remove(files.join(self._partial, name))
        if not files.is_remote(self._partial):
            os.rmdir(files.local_path(self._partial))


def _name(block: int) -> str:
    return f"{block:06d}.jsonl"


def write_all(
    flags: TrainedFlags, decoding: Decoding, prompts_path: str, column: str, output_path: str
) -> None:
    """Writes the results for a file of prompts, or continues a killed command's output."""
    with processes.failing_together():
        prompts = read_prompts(prompts_path, column)
    generator = generator_of(flags, decoding)
    folder = flags.model_dir
    settings = {
        "model_dir": folder if files.is_remote(folder) else os.path.abspath(folder),
        "step": generator.step,
        "vocabulary": flags.vocabulary,
        "input": hashlib.sha256("\n".join(prompts).encode()).hexdigest(),
        **({"average": flags.average} if flags.average else {}),
        **dataclasses.asdict(decoding),
    }
    size, done = _BATCHES * decoding.batch_size, 0
    processes.check_equal(f"--input={prompts_path}, by SHA-256", settings["input"])
    with processes.failing_together():
        if processes.is_first():
            output = _Output(output_path, settings)
            done = output.begin()
    done = int(processes.gathered(str(done))[0])
    blocks = range(done, -(-len(prompts) // size))
    with progress.shown("generating", len(prompts), done * size) as bar:
        for block in blocks:
            first = block * size
            part = prompts[first : first + size]
            lines = _lines(part, results(generator, part, first, decoding.num_return_sequences))
            if processes.is_first():
                output.add(block, lines)
            bar.update(first + len(part))
    if processes.is_first():
        output.end(blocks.stop)
    print(f"{output_path}: {len(prompts):,} prompts, step {generator.step:,}")
