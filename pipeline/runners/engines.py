"""Engines: where the pieces of a job are worked on, chosen by --runner.

A job is a map: `engine.run(work, pieces, folder)` calls `work` on every piece, anywhere and perhaps
several times, and returns the sums of its counts, each piece counted once. The results are files in
`folder` that are written atomically and depend on nothing but the piece. So the files are the same,
whatever an engine loses, repeats or does twice at once.
"""

import contextlib
import dataclasses
import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from pipeline.runners import beam_options, local_workers
from tasks.reading.corpus import Corpus, CorpusSpec
from tasks.storage import files
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import flags_of, made, names_of, parse
from tasks.terminal.polling import polling

# Engines by --runner, "module:class"; all other runners are Beam's. The class is a frozen dataclass
# whose fields are the engine's flags, and `verbose`, with the attributes of `Engine`.
ENGINES = {
    "ray": "pipeline.runners.ray_job:Ray",
    "spark": "pipeline.runners.spark_job:Spark",
}


class Engine(Protocol):
    """Calls a function on every piece of a job."""

    @property
    def is_local(self) -> bool:
        """Whether the workers are processes of this machine, whose time a dry run measures."""

    @property
    def bills(self) -> str:
        """The service that bills its workers by vCPU and hour; "" if none does."""

    def check(self, corpus: CorpusSpec, folder: str) -> None:
        """Raises a UserError for a mistake that only the running job would report."""

    def run(
        self, work: Callable[[Any], Mapping[str, int]], pieces: Sequence[Any], folder: str
    ) -> Counter[str]:
        """Calls `work`, which must be repeatable, on the pieces; sums its counts.

        `folder` holds the results; errors that name no file are given its name. Raises a UserError
        if workers died or one found a mistake that the user can correct, and an OSError if one
        could not read or write.
        """


def chosen(flags: Any) -> Engine:
    """Returns the engine of a command's flags runner, runner_flags, workers and verbose."""
    name = (flags.runner or "").lower()
    if getattr(flags, "part", None) and name not in ("", beam_options.IN_PROCESS.lower()):
        raise UserError(
            f"--part={flags.part} is for processes that work on this machine, with --workers: "
            f"--runner={flags.runner} spreads all pieces by itself"
        )
    for other in sorted(ENGINES.keys() - {name}):
        if len(_unread(flags.runner_flags, [_class(other)])) < len(flags.runner_flags):
            names = [f"--{each}" for each in _names([_class(other)])]
            raise UserError(f"only --runner={other} reads {' and '.join(names)}")
    if name not in ENGINES:
        arguments = beam_options.arguments(flags)
        if arguments == [f"--runner={beam_options.IN_PROCESS}"]:
            return local(flags.workers)
        # Importing Beam takes seconds.
        from pipeline.runners import beam_job

        return beam_job.Beam(tuple(arguments), flags.verbose)
    if flags.workers != 1:
        raise UserError(
            f"--workers is for {beam_options.IN_PROCESS} only: the cluster of --runner={name} has "
            "its own workers"
        )
    kind = _class(name)
    if others := _unread(flags.runner_flags, [kind]):
        beam_options.refuse_unknown(others, [*names_of(flags), *_names([kind])])
        raise UserError(f"{others[0]} has no effect with --runner={name}")
    return dataclasses.replace(made(kind, parse(kind, flags.runner_flags)), verbose=flags.verbose)


def local(workers: int = 1) -> Engine:
    """Returns the engine that is this machine."""
    return local_workers.Local(workers)


def refuse_unknown(given: Sequence[str], known: Collection[str]) -> None:
    """Raises a UserError for the first of `given` flags that no engine has, nor we (`known`)."""
    beam_options.refuse_unknown(_unread(given, map(_class, ENGINES)), known)


def _class(name: str) -> Any:
    module, _, kind = ENGINES[name].partition(":")
    return getattr(importlib.import_module(module), kind)


def _names(kinds: Iterable[type]) -> list[str]:
    return [name for kind in kinds for flag in flags_of(kind) for name in flag.names]


def _unread(given: Sequence[str], kinds: Iterable[type]) -> list[str]:
    """Returns those of the `given` words that are no flags of the engines `kinds`."""
    flags = [f"--{name}" for name in _names(kinds)]

    def is_ours(word: str) -> bool:
        return word.partition("=")[0].replace("-", "_").replace("__", "--", 1) in flags

    return [
        word
        for before, word in itertools.pairwise(["", *given])
        if not is_ours(word) and (word.startswith("--") or not is_ours(before) or "=" in before)
    ]


def without_pieces(corpus: Corpus) -> Corpus:
    """Returns a corpus for workers: each is sent its own pieces, out of perhaps a million files."""
    record = {key: value for key, value in corpus.record.items() if key != "files"}
    return dataclasses.replace(corpus, record=record, pieces=(), notes=())


@contextlib.contextmanager
def files_shown(
    title: str, folder: str, sizes: Mapping[str, int], unit: str = ""
) -> Iterator[None]:
    """Shows progress during the block: the total of `sizes`, by name, of files in `folder`."""

    def done() -> int:
        return sum(sizes[name] for name in sizes.keys() & set(files.list_names(folder)))

    def look() -> None:
        bar.update(done())

    with progress.shown(title, sum(sizes.values()), done(), unit) as bar:
        with polling(look, files.is_remote(folder)):
            yield
        bar.update(sum(sizes.values()))
