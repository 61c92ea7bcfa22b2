"""Engines: where the pieces of a job are worked on, chosen by --runner.

A job is a map: `engine.run(work, pieces, folder)` calls `work` on every piece, anywhere and perhaps
several times, and returns the sums of its counts, each piece counted once. The results are files in
`folder` that are written atomically and depend on nothing but the piece. So the files are the same,
whatever an engine loses, repeats or does twice at once.
"""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from pipeline.runners import local_workers
from tasks import annexes
from tasks.reading.corpus import Corpus, CorpusSpec
from tasks.storage import files
from tasks.terminal import foreign_flags, progress
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import flags_of, made, names_of, parse
from tasks.terminal.polling import polling

# The slot of annexes with engines by --runner; names are read in any case and without "Runner".
# An entry is a class with the attributes of `Kind`.
_SLOT = "engines"
# The name for the workers of this machine, after Beam's.
LOCAL = "FnApiRunner"
# Flags sometimes given to the wrong command.
OF_PRETRAIN = (
    *("batch_size", "init_from", "lengths.inputs", "lengths.targets", "microbatches"),
    *("model_dir", "optimizer.learning_rate", "optimizer_preset", "preset", "seed"),
    *("tokens_per_batch", "train_steps"),
)


@dataclasses.dataclass(frozen=True)
class Bill:
    """The price of a service's workers."""

    service: str
    dollars: float  # per vCPU and hour, by the price list
    error: float  # of an estimate, as a share


class Engine(Protocol):
    """Calls a function on every piece of a job."""

    @property
    def is_local(self) -> bool:
        """True if the workers are processes of this machine, whose time a dry run measures."""

    @property
    def bill(self) -> Bill | None:
        """The workers' price; None if nobody bills them by vCPU and hour."""

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


class Kind(Protocol):
    """A kind of engine, which has flags of its own."""

    is_slow_to_ask: bool  # `not_of` imports for seconds

    def names(self) -> list[str]:
        """Returns the names of flags to propose for a word that is none."""

    def not_of(self, given: Sequence[str]) -> list[str]:
        """Returns the `given` words without the engine's flags."""

    def made(self, given: Sequence[str], verbose: bool) -> Engine:
        """Returns the engine of its flags."""


class FlagsOfFields:
    """A kind of engine that is a frozen dataclass: its flags are its fields but `verbose`."""

    is_slow_to_ask = False

    @classmethod
    def names(cls) -> list[str]:
        kind: Any = cls
        return [name for flag in flags_of(kind) for name in flag.names]

    @classmethod
    def not_of(cls, given: Sequence[str]) -> list[str]:
        flags = [f"--{name}" for name in cls.names()]

        def is_ours(word: str) -> bool:
            return word.partition("=")[0].replace("-", "_").replace("__", "--", 1) in flags

        return [
            word
            for before, word in itertools.pairwise(["", *given])
            if not is_ours(word) and (word.startswith("--") or not is_ours(before) or "=" in before)
        ]

    @classmethod
    def made(cls, given: Sequence[str], verbose: bool) -> Any:
        kind: Any = cls
        return dataclasses.replace(made(kind, parse(kind, given)), verbose=verbose)


def chosen(flags: Any) -> Engine:
    """Returns the engine of a command's flags runner, runner_flags, workers and verbose."""
    name = _name(flags.runner or LOCAL)
    if name is None:
        on_slurm = "; on Slurm, give each task of an array --part=K/N"
        on_slurm *= flags.runner.lower().startswith("slurm")
        known = ", ".join([*annexes.entries(_SLOT), LOCAL])
        raise UserError(f"unknown --runner={flags.runner}: it is {known}{on_slurm}")
    if getattr(flags, "part", None) and name != LOCAL:
        raise UserError(
            f"--part={flags.part} is for processes that work on this machine, with --workers: "
            f"--runner={flags.runner} spreads all pieces by itself"
        )
    kind: Kind | None = annexes.get(_SLOT, name)
    if left := kind.not_of(flags.runner_flags) if kind else list(flags.runner_flags):
        for other, reader in _kinds().items():
            if left[0] not in reader.not_of(left):
                raise UserError(f"only --runner={other} reads {left[0].partition('=')[0]}")
        _refuse(left, names_of(flags))
    if kind is None:
        return local(flags.workers)
    if flags.workers != 1:
        raise UserError(
            f"--workers is for {LOCAL} only: the cluster of --runner={name} has its own workers"
        )
    return kind.made(flags.runner_flags, flags.verbose)


def local(workers: int = 1) -> Engine:
    """Returns the engine that is this machine."""
    return local_workers.Local(workers)


def refuse_unknown(given: Sequence[str], known: Collection[str]) -> None:
    """Raises a UserError for the first of `given` flags that no engine has, nor we (`known`)."""
    left = [*given]
    for kind in _kinds().values() if left else ():
        left = left and kind.not_of(left)
    if left:
        _refuse(left, known)


def _refuse(unknown: Sequence[str], known: Collection[str]) -> NoReturn:
    flag = unknown[0].partition("=")[0]
    of_engines = [name for kind in _kinds().values() for name in kind.names()]
    hint = foreign_flags.hint(flag, [*known, *of_engines])
    if flag.removeprefix("--") in OF_PRETRAIN:
        hint = " (it is a flag of trainer.pretrain)"
    raise UserError(f"unknown flag {flag}{hint}")


def _name(runner: str) -> str | None:
    names = (LOCAL, *annexes.entries(_SLOT))
    return next((name for name in names if _plain(name) == _plain(runner)), None)


def _plain(name: str) -> str:
    return name.lower().removesuffix("runner")


def _kinds() -> dict[str, Kind]:
    """Returns all kinds of engines by name, those first that answer at once."""
    return dict(sorted(annexes.loaded(_SLOT).items(), key=lambda each: each[1].is_slow_to_ask))


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
