"""Generates text after prompts, by a checkpoint of a run.

python -m trainer.generate --model_dir=DIR --prompt=TEXT
python -m trainer.generate --model_dir=DIR --input=FILE --output=FILE.jsonl

A file of prompts is text with one prompt a line, or JSON lines with a text in --column. The output
has a line for each prompt, in order: the prompt and its results. If the command is killed, the same
command goes on where it stopped, and the output is the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import Parser, UserError
from tasks.terminal.dataclass_flags import add_flags
from tasks.terminal.fields import Rejected
from trainer.decoding.config import Decoding

if TYPE_CHECKING:
    from trainer.decoding.generator import Generator

# Batches between two writes; also what a killed command loses at most.
_BATCHES = 8


def add_run_flags(parser: Parser) -> None:
    """Adds the flags that name a checkpoint and its vocabulary."""
    add = parser.add_argument
    add("--model_dir", required=True, help="folder of the run, local or remote")
    add("--step", type=int, help="step of the checkpoint; the newest if left out")
    add("--vocabulary", help="folder or file of the vocabulary; the cache's if left out")
    add("--cache_dir", help="folder of caches by task, if they were moved after training")


def decoding_of(flags: argparse.Namespace) -> Decoding:
    """Returns the choices that flags name.

    Raises:
      UserError: they do not fit together.
    """
    names = [field.name for field in dataclasses.fields(Decoding)]
    try:
        return Decoding(**{name: getattr(flags, name) for name in names})
    except Rejected as error:
        raise UserError(f"--{error.field}={error.value}: it must be {error.rule}") from error


def generator_of(flags: argparse.Namespace, decoding: Decoding) -> Generator:
    """Returns the generator that flags name; says on stderr if it has no cache."""
    from trainer.decoding.generator import Generator

    made = Generator(
        flags.model_dir, decoding, flags.step, flags.cache_dir, vocabulary=flags.vocabulary
    )
    if made.decoder.without_cache:
        print(
            f"note: no cache: {made.decoder.without_cache} cannot keep keys and values, so the "
            "whole row is computed for every token",
            file=sys.stderr,
        )
    return made


def read_prompts(path: str, column: str) -> list[str]:
    """Returns the prompts in a file.

    Raises:
      UserError: a line is no JSON object with a text in `column`, or there are no lines.
    """
    try:
        lines = files.read_bytes(path).decode().splitlines()
    except FileNotFoundError as error:
        raise UserError(f"--input={path} does not exist") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--input={path} is not UTF-8 text") from error
    if not lines:
        raise UserError(f"--input={path} is empty")
    if not path.endswith((".jsonl", ".json")):
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompts.append(json.loads(line)[column])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"--input={path}, line {number}: no JSON object with {column!r}; name the prompts' "
                "field by --column"
            ) from error
        if not isinstance(prompts[-1], str):
            raise UserError(f"--input={path}, line {number}: {column!r} is not a text")
    return prompts


def results(generator: Generator, prompts: list[str], first: int, count: int) -> list[str]:
    """Returns a JSON line for each prompt, of which the first has number `first`.

    `count` is the number of results of a prompt.
    """
    ids = [generator.ids(prompt) for prompt in prompts]
    found = generator(ids, range(first, first + len(prompts)))
    lines = []
    for place, prompt in enumerate(prompts):
        made = [
            {
                "text": generator.text(each.ids),
                "ids": each.ids.tolist(),
                # Sums of float32 differ in their last digits between machines.
                "score": round(each.score, 4),
                "ended": each.ended,
            }
            for each in found[place * count : (place + 1) * count]
        ]
        lines.append(json.dumps({"prompt": prompt, "results": made}, ensure_ascii=False) + "\n")
    return lines


class _Output:
    """A file of lines that a killed command continues.

    Until it is complete, its lines are in `path`.partial, after one that says what they are of.
    """

    def __init__(self, path: str, settings: dict[str, Any]):
        if files.is_remote(path):
            raise UserError(f"--output={path}: give a local file")
        if os.path.exists(path):
            raise UserError(f"--output={path} exists: name another file, or delete it")
        self._path, self._partial = path, f"{path}.partial"
        self._header = json.dumps(settings, sort_keys=True).encode() + b"\n"

    def begin(self, block: int) -> int:
        """Returns how many lines are there, in whole blocks; what is after them is dropped."""
        files.make_folder(os.path.dirname(os.path.abspath(self._path)))
        try:
            with open(self._partial, "rb") as file:
                header, *lines = file.read().splitlines(keepends=True) or [b""]
        except FileNotFoundError:
            header, lines = b"", []
        if header.endswith(b"\n") and header != self._header:
            raise UserError(
                f"{self._partial} was written by another command: delete it, or name another "
                "--output"
            )
        complete = sum(line.endswith(b"\n") for line in lines) // block * block
        with open(self._partial, "wb") as file:
            file.write(self._header + b"".join(lines[:complete]))
        return complete

    def add(self, lines: list[str]) -> None:
        """Writes lines, so that they are there after a kill."""
        with open(self._partial, "ab") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())

    def end(self) -> None:
        """Gives the lines their name."""
        with open(self._partial, "rb") as file:
            file.readline()
            files.write_bytes(self._path, file.read())
        os.remove(self._partial)


def _write_all(flags: argparse.Namespace, decoding: Decoding) -> None:
    prompts = read_prompts(flags.input, flags.column)
    block = _BATCHES * decoding.batch_size
    generator = generator_of(flags, decoding)
    settings = {
        "model_dir": os.path.abspath(flags.model_dir)
        if not files.is_remote(flags.model_dir)
        else flags.model_dir,
        "step": generator.step,
        "vocabulary": flags.vocabulary,
        "input": hashlib.sha256("\n".join(prompts).encode()).hexdigest(),
        **dataclasses.asdict(decoding),
    }
    output = _Output(flags.output, settings)
    done = output.begin(block)
    with progress.shown("generating", len(prompts), done) as bar:
        for first in range(done, len(prompts), block):
            part = prompts[first : first + block]
            output.add(results(generator, part, first, decoding.num_return_sequences))
            bar.update(first + len(part))
    output.end()
    print(f"{flags.output}: {len(prompts):,} prompts, step {generator.step:,}")


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m trainer.generate", description=__doc__.splitlines()[0])
    add_run_flags(parser)
    add = parser.add_argument
    add("--prompt", help="text to go on from; <extra_id_0> and the like are sentinels")
    add("--input", help="file of prompts: lines of text, or JSON lines if it ends in .jsonl")
    add("--column", default="text", help="field of a JSON line that holds the prompt")
    add("--output", help="file of JSON lines to write, which must not exist")
    add_flags(parser.add_argument_group("decoding"), Decoding)
    flags = parser.parse_args(argv)
    if (flags.prompt is None) == (flags.input is None):
        raise UserError("give either --prompt or --input")
    if (flags.input is None) != (flags.output is None):
        raise UserError("--input and --output belong together")
    decoding = decoding_of(flags)
    if flags.output is not None:
        _write_all(flags, decoding)
        return
    generator = generator_of(flags, decoding)
    for found in generator([generator.ids(flags.prompt)]):
        print(generator.text(found.ids))


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
