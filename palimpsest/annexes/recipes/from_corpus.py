"""Pretrains on a corpus: builds its cache, and trains while it is being built.

    palimpsest pretrain --corpus=hf:OWNER/NAME --task=span_corruption --name=mine \\
        --vocabulary=DIR --preset=t5_1_1_small --cache_dir=DIR --model_dir=DIR [--train_steps=N]

Takes the flags of `palimpsest build` and `palimpsest pretrain`, and runs both with --follow: the
cache and the run are the same as by these commands one after the other. Run the same command again
to resume both. With several languages, the run begins when all caches are finished.
"""

import dataclasses
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from palimpsest.annexes.recipes import derived_flags
from palimpsest.annexes.recipes.waiting import waited
from palimpsest.commands import COMMANDS, command
from tasks import registry
from tasks.reading import languages
from tasks.task import OBJECTIVES
from tasks.terminal import child
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field
from tasks.terminal.flags import flags_of, given_flags, made, parse, refuse_unknown

_BUILD, _RUN = "build", "pretrain"
# Flags of a build that makes no whole cache, or changes one on which a run may have trained.
_REFUSED = ("dry_run", "json", "part", "extend")
# Flags of a run that this command gives itself, or that show a run of a finished cache.
_OF_RUNS = ("follow", "data.follow", "following.on", "print_config")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    words: tuple[str, ...] = field(
        (), "flags of palimpsest build and palimpsest pretrain", rest=lambda *_: None
    )


def run(flags: Flags) -> int:
    """Builds and trains; returns the exit code of the first command that fails."""
    of_build, of_run = split(flags.words)
    kind = command(COMMANDS[_BUILD]).flags
    options: Any = made(kind, given := parse(kind, of_build))
    for path, value in given.values.items():
        if value and (name := path.rpartition(".")[2]) in _REFUSED:
            raise UserError(f"--{name} is of builds alone: run palimpsest {_BUILD}, then {_RUN}")
    for word in of_run:
        if word.startswith("--") and (name := _name(word)) in _OF_RUNS:
            raise UserError(f"--{name}: leave it out beside --corpus, or build the cache first")
    if options.task_module:
        registry.load(options.task_module)
    task = options.task
    if options.name and task in OBJECTIVES:
        task = derived_flags.own_task(task, options.name)
    of_run += [f"--task={task}", f"--cache_dir={options.cache_dir}"]
    of_run += [f"--task_module={options.task_module}"] * bool(options.task_module)
    if options.row_tokens is None and (tokens := _row_tokens(task, of_run)):
        of_build += [f"--row_tokens={tokens}"]
    if list(languages.specs(options.corpus, options.languages)) != [""]:
        # The rate of a language follows from the size of its cache.
        return waited(_started(_BUILD, of_build)) or waited(_started(_RUN, of_run))
    return _followed(_started(_BUILD, of_build, subprocess.PIPE), [*of_run, "--follow"])


def _name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0].replace("-", "_")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns (the build's words, the run's); a runner's flags are the build's.

    Raises UserError for a flag that neither has.
    """
    build, run = (
        {name for flag in flags_of(command(COMMANDS[each]).flags) for name in flag.names}
        for each in (_BUILD, _RUN)
    )
    groups = {name.removesuffix("*") for name in run if name.endswith(".*")}
    has_runner = any(word.partition("=")[0] == "--runner" for word in words)
    found: dict[bool, list[str]] = {True: [], False: []}
    ours = True
    for word in words:
        if word.startswith("--"):
            name = _name(word)
            is_run = name in run or name.startswith(tuple(groups))
            ours = name in build or not is_run
            if ours and name not in build and not has_runner:
                refuse_unknown([word], build | run)
            if name.startswith("processes."):
                raise UserError(
                    f"--{name}: start the build on one host by palimpsest {_BUILD}, and on every "
                    f"host palimpsest {_RUN} with --follow"
                )
        found[ours].append(word)
    return found[True], found[False]


def _row_tokens(task: str, words: Sequence[str]) -> int | None:
    """Returns the window of the run; raises UserError for a mistake in its flags."""
    from trainer.config.from_flags import OpenRunFlags, configured

    config, _ = configured(given_flags(OpenRunFlags, words))
    data, rows = config.data, config.lengths
    packed = (data.example_inputs, data.example_targets)
    lengths = packed if data.pack_examples else (rows.inputs, rows.targets)
    return derived_flags.window_tokens(task, *lengths)


def _started(name: str, words: Sequence[str], output: int | None = None) -> subprocess.Popen[str]:
    print(f"palimpsest {name} {shlex.join(words)}", flush=True)
    errors = None if output is None else subprocess.STDOUT
    line = child.command("palimpsest", [*name.split(), *words])
    return subprocess.Popen(line, stdout=output, stderr=errors, text=True, errors="replace")


def _followed(build: subprocess.Popen[str], words: Sequence[str]) -> int:
    """Trains beside a build, whose lines are shown with its name; returns an exit code.

    If one of them fails, the other is stopped, and resumes with the same command.
    """
    assert build.stdout
    lines = threading.Thread(target=_show, args=(build.stdout,), daemon=True)
    lines.start()
    code = waited(build, _started(_RUN, words))
    lines.join(timeout=5)
    return code


def _show(lines: IO[str]) -> None:
    for line in lines:
        print(f"{_BUILD}: {line}", end="", file=sys.stderr, flush=True)


main = Command(Flags, run, waits=True)
