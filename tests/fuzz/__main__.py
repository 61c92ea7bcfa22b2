"""Draws builds, runs, tokenizers and configurations, and checks each against an oracle of its own.

    python -m tests.fuzz builds --count=300 --seed=7
    python -m tests.fuzz runs --count=60 --seed=7
    python -m tests.fuzz tokenizers --count=200 --texts=100000 --seed=7
    python -m tests.fuzz configs --count=300 --seed=7
    python -m tests.fuzz builds --seed=7 --only=17      # one of them again

builds: a corpus of a drawn format is built with a drawn vocabulary, packing, limits and filters.
The cache must hold what tests/fuzz/caches.py expects, byte by byte of every file. The same build
is ended at drawn moments and resumed, extended and killed, documents are taken down and killed:
each time the files must be those of the undisturbed commands, and the oracle's.

runs: a model, objective, mixture, optimizer and what saves and evaluates are drawn for a run of 6
to 12 updates. The windows of its batches must be the cache's, each once an epoch. The same run is
ended at drawn moments and resumed: states and metrics must be equal, bit for bit. `compare`,
`explain` and `evaluate` must agree.

tokenizers: byte-level BPE, BPE, unigram and WordPiece with drawn rules and pieces. The ids of
random texts must be those of `tokenizers` or SentencePiece.

configs: the config.json of a small model that transformers wrote loses fields, or gets fields of
other spellings, kinds and types. Our logits must equal transformers'; otherwise, one line
refuses the file.

Commands run in forks of one process that has imported everything. Prints what was tried, the seed,
and for each difference the command that draws it again; its folder is kept. Exits with 1 if there
is a difference.
"""

import argparse
import importlib
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from types import ModuleType

from tasks.terminal import progress
from tasks.terminal.command_line import UserError, run
from tests.fuzz import forks

_COUNTS = {"builds": 300, "runs": 60, "tokenizers": 200, "configs": 300}


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    for name, count in _COUNTS.items():
        add = commands.add_parser(name, allow_abbrev=False).add_argument
        add("--count", type=int, default=count, help=f"number of {name} (default: {count})")
        add("--seed", type=int, help="of all random choices; drawn and printed if not set")
        add("--only", type=int, help=f"only this one of the {name}, from 0")
        add("--minutes", type=float, help="begin no further ones after this time")
        add("--jobs", type=int, default=2, help="number at the same time")
        add("--output", help="a new folder, kept afterwards; temporary, but for differences")
        add("--verbose", action="store_true", help="print what each of them tried")
        if name == "tokenizers":
            add("--texts", type=int, default=100_000, help="random texts for each of them")
    return parser


def _module(what: str) -> ModuleType:
    """Imports what a command needs, JAX with the settings of the tests."""
    import tests.conftest  # noqa: F401 - sets JAX's environment

    return importlib.import_module(f"tests.fuzz.{what}")


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if there is a difference."""
    flags = command_line().parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells' background jobs ignore Ctrl-C, and so would what is started here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    seed = int.from_bytes(os.urandom(3)) if flags.seed is None else flags.seed
    folder = pathlib.Path(flags.output or tempfile.mkdtemp(prefix="fuzz-")).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder for --output")
    folder.mkdir(parents=True, exist_ok=True)
    begin, module = time.monotonic(), _module(flags.what)
    if flags.what == "tokenizers":
        module.TEXTS = flags.texts
    print(f"python -m tests.fuzz {flags.what} --count={flags.count} --seed={seed}", flush=True)

    def trial(number: int) -> str:
        made = module.Trial(seed, number, folder)
        said = made.run()
        made.clean()
        return said

    numbers = range(flags.count) if flags.only is None else [flags.only]
    module.warm(folder / "shared", len(numbers))
    end = begin + 60 * flags.minutes if flags.minutes else float("inf")
    outcome = Counter[str]()
    with progress.shown(flags.what, len(numbers)) as bar:
        for number, equal, text in forks.run_trials(trial, numbers, folder, flags.jobs, end):
            outcome["equal" if equal else "differences"] += 1
            if not equal or flags.verbose:
                print(f"{number}: {text}", flush=True)
            if not equal:
                again = f"python -m tests.fuzz {flags.what} --seed={seed} --only={number}"
                print(f"{number}: kept in {folder / str(number)}; {again}", file=sys.stderr)
            bar.update(outcome.total(), f"{outcome['differences']} differences")
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{outcome.total()} random {flags.what}, {outcome['differences']} differences, seed "
        f"{seed}, {minutes:.1f} minutes"
    )
    if not (outcome["differences"] or flags.output):
        shutil.rmtree(folder)
    return 1 if outcome["differences"] else 0


if __name__ == "__main__":
    run(main)
