"""Breaks training runs at random moments and checks that the result is the same, bit for bit.

    python -m trainer.chaos --model_dir=DIR --kills=10 --damages=5 --steps=200 --seed=7
    python -m trainer.chaos --model_dir=DIR --follow --kills=15 --vocabulary=DIR

One run trains undisturbed. Another run of the same configuration is ended by SIGKILL, Ctrl-C or
SIGTERM at random moments, while it starts, makes updates, evaluates or writes a checkpoint, and
restarted each time by the same command. Then files of newest checkpoints are damaged: the run must
name the newest sound one, and resume from it with `--checkpoint.on_damage=fall_back`. Last, a
second run starts in the directory of one that is going on, and a run resumes with an edited task:
both must be refused. Final states and loss curves must equal the undisturbed run's, bit for bit,
and no run may print a traceback.

With --follow, runs follow builds of a corpus, and builds, runs or both are ended
(`trainer.faults.followed`): the caches must be the same, too, file by file.

Prints Markdown tables; exits with 1 if anything differs. Flags of `trainer.pretrain` are passed on
to all runs.
"""

import argparse
import pathlib
import random
import signal
import sys
import time

from tasks.storage import files
from tasks.terminal import command_line, progress
from tasks.terminal.command_line import Parser, UserError, positive
from trainer.faults import damages, followed, kills

# Flags of one mode alone, with their defaults.
_OF_FINISHED: dict[str, str | int] = {"cache_dir": "demo/cache", "damages": 5}
_OF_FOLLOWED: dict[str, str | int] = {
    "corpus": "python_docs",
    "vocabulary": "demo/vocabulary",
    "shard_bytes": 56 << 10,
}


def parser() -> Parser:
    """Returns the command's parser."""
    made = Parser(
        prog="python -m trainer.chaos",
        description=__doc__.splitlines()[0],
        epilog="Flags of trainer.pretrain are passed on to all runs.",
    )
    add = made.add_argument
    add("--model_dir", required=True, help="new or empty folder for the runs; kept if they differ")
    add("--task", default="python_docs_span_corruption", help="task of the cache")
    add("--preset", default="t5_1_1_tiny", help="model preset, see trainer.pretrain --help")
    add("--kills", type=int, default=10, help="number of signals that end a run, 0 or more")
    add("--steps", type=int, default=200, help="updates of a run, 20 or more")
    add("--seed", type=int, default=0, help="seed of the planned kills; their timing still varies")
    finished = made.add_argument_group("runs on a finished cache")
    finished.add_argument("--cache_dir", help=f"folder of caches by task {_default('cache_dir')}")
    finished.add_argument(
        "--damages", type=int, help=f"damaged checkpoints, 0 or more {_default('damages')}"
    )
    builds = made.add_argument_group("runs that follow a build")
    builds.add_argument("--follow", action="store_true", help="kill builds and runs beside them")
    builds.add_argument("--corpus", help=f"corpus SPEC to build {_default('corpus')}")
    builds.add_argument("--vocabulary", help=f"its vocabulary {_default('vocabulary')}")
    builds.add_argument(
        "--shard_bytes", type=positive, help=f"corpus bytes a shard {_default('shard_bytes')}"
    )
    return made


def _default(name: str) -> str:
    return f"(default: {({**_OF_FINISHED, **_OF_FOLLOWED})[name]})"


def _complete(flags: argparse.Namespace) -> None:
    """Fills in the defaults of the mode, and refuses the flags of the other one.

    Raises:
      UserError: a flag is of the other mode, too small, or names what is not there.
    """
    own, others, without = _OF_FINISHED, _OF_FOLLOWED, "which goes with --follow"
    if flags.follow:
        own, others, without = _OF_FOLLOWED, _OF_FINISHED, "which does not go with --follow"
    for name in others:
        if getattr(flags, name) is not None:
            raise UserError(f"--{name}={getattr(flags, name)}, {without}: leave out one of the two")
    for name, default in own.items():
        if getattr(flags, name) is None:
            setattr(flags, name, default)
    for name, least in (("kills", 0), ("damages", 0), ("steps", 20)):
        value = getattr(flags, name)
        if value is not None and value < least:
            raise UserError(f"--{name}={value}: must be at least {least}")
    name, what = ("vocabulary", "vocabulary") if flags.follow else ("cache_dir", "cache")
    if not files.exists(getattr(flags, name)):
        raise UserError(
            f"there is no {what} {getattr(flags, name)}: give --{name}, or run make demo"
        )


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if the runs differ."""
    flags, settings = parser().parse_known_args(argv)
    folder = pathlib.Path(flags.model_dir)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder for --model_dir")
    _complete(flags)
    folder.mkdir(parents=True, exist_ok=True)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells' background jobs ignore Ctrl-C, and so would the runs.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Exit by an exception, so that builds and runs are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    break_runs = followed.kill_pairs if flags.follow else _break_runs
    failures = break_runs(flags, settings, folder, random.Random(flags.seed))
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _break_runs(
    flags: argparse.Namespace, settings: list[str], folder: pathlib.Path, generator: random.Random
) -> list[str]:
    """Breaks runs on a finished cache, and prints what was done; returns what went wrong."""
    begin = time.monotonic()
    undisturbed, start = kills.undisturbed_run(flags, settings, folder / "undisturbed")
    killed, runs, failures = kills.kill_runs(flags, settings, undisturbed, start, generator)
    damaged, found = damages.damage_checkpoints(flags, settings, undisturbed, generator)
    failures += found
    refused, found = damages.try_refused(flags, settings, undisturbed)
    failures += found
    print(kills.kills_table(killed))
    if damaged:
        print("\n" + damages.damages_table(damaged))
    for fault, holds in refused.items():
        print(f"\n{fault} was {'refused' if holds else 'NOT refused'}")
    lines = len(undisturbed.lines())
    verdict = "differ from" if failures else "equal, bit for bit,"
    print(
        f"\nfinal state and {lines} lines of metrics of {runs} killed run(s) of {flags.steps} "
        f"updates {verdict} those of an undisturbed run; {flags.preset}, seed {flags.seed}, "
        f"{progress.clock(time.monotonic() - begin)}"
    )
    return failures


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
