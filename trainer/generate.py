"""Generates text after prompts, by a checkpoint of a run.

python -m trainer.generate --model_dir=DIR --prompt=TEXT
python -m trainer.generate --model_dir=DIR --input=FILE --output=FILE.jsonl

A file of prompts is text with one prompt a line, or JSON lines with a text in --column. The output
has a line for each prompt, in order: the prompt and its results. If the command is killed, the same
command goes on where it stopped, and the output is the same. Input and output are local or remote.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from tasks import registry
from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import Parser, UserError
from tasks.terminal.dataclass_flags import add_flags, options_of
from trainer.config.decoding import Decoding
from trainer.config.processes import add_processes_flags, processes_of

if TYPE_CHECKING:
    from trainer.trained.generator import Generator

# Batches between two writes; also what a killed command loses at most.
_BATCHES = 8
_SETTINGS = "settings.json"


def add_run_flags(parser: Parser) -> None:
    """Adds the flags that name a checkpoint and its vocabulary."""
    add = parser.add_argument
    add("--model_dir", required=True, help="folder of the run, local or remote")
    add("--step", type=int, help="step of the checkpoint; the newest if left out")
    add("--vocabulary", help="folder or file of the vocabulary; the cache's if left out")
    add("--cache_dir", help="folder of caches by task, if they were moved after training")
    add("--task_module", help="Python module that registers the vocabulary, if it is a class")


def generator_of(flags: argparse.Namespace, decoding: Decoding) -> Generator:
    """Returns the generator that flags name; says on stderr if it has no cache."""
    from trainer.engine import processes
    from trainer.trained.generator import Generator

    if flags.task_module:
        registry.load(flags.task_module)
    made = Generator(
        flags.model_dir, decoding, flags.step, flags.cache_dir, vocabulary=flags.vocabulary
    )
    if made.decoder.without_cache and processes.is_first():
        print(
            f"note: no cache: {made.decoder.without_cache} cannot keep keys and values, so the "
            "whole row is computed for every token",
            file=sys.stderr,
        )
    return made


def read_prompts(path: str, column: str) -> list[str]:
    """Returns the prompts in a file.

    Raises:
      UserError: a line is no JSON object with a text in `column`, there are no lines, or the file
        cannot be read.
    """
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
        try:
            prompts.append(json.loads(line)[column])
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"--input={path}, line {number}: no JSON object with {column!r}; name the prompts' "
                "field by --column"
            ) from error
        if not isinstance(prompts[-1], str):
            raise UserError(f"--input={path}, line {number}: {column!r} is not a text")
        try:
            prompts[-1].encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"--input={path}, line {number}: {column!r} has half a character, "
                f"{error.object[error.start]!r}"
            ) from error
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
    """A file of lines, local or remote, that a killed command continues.

    Until it is complete, its lines are in the folder `path`.partial: a file for each block, and one
    that says what they are of.
    """

    def __init__(self, path: str, settings: dict[str, Any]):
        if files.exists(path):
            raise UserError(f"--output={path} exists: name another file, or delete it")
        self._path, self._partial = path, f"{path}.partial"
        self._settings = settings

    def begin(self) -> int:
        """Returns how many blocks are there."""
        files.make_folder(self._partial)
        files.remove_partial(self._partial)
        names, place = files.list_names(self._partial), files.join(self._partial, _SETTINGS)
        if _SETTINGS not in names:
            files.write_json(place, self._settings)
        elif files.read_json(place) != self._settings:
            raise UserError(
                f"{self._partial} was written by another command: delete it, or name another "
                "--output"
            )
        return next(block for block in itertools.count() if _name(block) not in names)

    def add(self, block: int, lines: list[str]) -> None:
        """Writes the lines of a block, so that they are there after a kill."""
        files.write_bytes(files.join(self._partial, _name(block)), "".join(lines).encode())

    def end(self, blocks: int) -> None:
        """Joins the blocks under the file's own name."""
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


def _write_all(flags: argparse.Namespace, decoding: Decoding) -> None:
    from trainer.engine import processes

    with processes.failing_together():
        prompts = read_prompts(flags.input, flags.column)
    generator = generator_of(flags, decoding)
    remote = files.is_remote(flags.model_dir)
    settings = {
        "model_dir": flags.model_dir if remote else os.path.abspath(flags.model_dir),
        "step": generator.step,
        "vocabulary": flags.vocabulary,
        "input": hashlib.sha256("\n".join(prompts).encode()).hexdigest(),
        **dataclasses.asdict(decoding),
    }
    size, done = _BATCHES * decoding.batch_size, 0
    processes.check_equal(f"--input={flags.input}, by SHA-256", settings["input"])
    with processes.failing_together():
        if processes.is_first():
            output = _Output(flags.output, settings)
            done = output.begin()
    done = int(processes.gathered(str(done))[0])
    blocks = range(done, -(-len(prompts) // size))
    with progress.shown("generating", len(prompts), done * size) as bar:
        for block in blocks:
            first = block * size
            part = prompts[first : first + size]
            lines = results(generator, part, first, decoding.num_return_sequences)
            if processes.is_first():
                output.add(block, lines)
            bar.update(first + len(part))
    if processes.is_first():
        output.end(blocks.stop)
    print(f"{flags.output}: {len(prompts):,} prompts, step {generator.step:,}")


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m trainer.generate", description=__doc__.splitlines()[0])
    add_run_flags(parser)
    add = parser.add_argument
    add("--prompt", help="text to go on from; <extra_id_0> and the like are sentinels")
    add("--input", help="file of prompts: lines of text, or JSON lines if it ends in .jsonl")
    add("--column", default="text", help="field of a JSON line that holds the prompt")
    add("--output", help="file or URL of JSON lines to write, which must not exist")
    add_flags(parser.add_argument_group("decoding"), Decoding)
    add_processes_flags(parser)
    flags = parser.parse_args(argv)
    if (flags.prompt is None) == (flags.input is None):
        raise UserError("give either --prompt or --input")
    if (flags.input is None) != (flags.output is None):
        raise UserError("--input and --output belong together")
    decoding = options_of(flags, Decoding)
    shared = processes_of(flags)

    from trainer.engine import processes

    with processes.joined(shared):
        if flags.output is not None:
            _write_all(flags, decoding)
            return
        generator = generator_of(flags, decoding)
        for found in generator([generator.ids(flags.prompt)]):
            print(generator.text(found.ids))


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
