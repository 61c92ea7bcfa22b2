"""Breaks builds, runs and recipes in every known way, and compares what is left with an oracle.

    python -m tests.laboratory builds --count=300 --seed=7
    python -m tests.laboratory builds --large --count=6 --kills=24 --workers=1-4
    python -m tests.laboratory runs --count=60 --seed=7
    python -m tests.laboratory runs --cache_dir=DIR --kills=10 --damages=9
    python -m tests.laboratory followed --vocabulary=DIR --kills=15
    python -m tests.laboratory recipes --recipe=recipes/demo.toml --kills=20
    python -m tests.laboratory tokenizers --count=200 --texts=100000 --seed=7
    python -m tests.laboratory configs --count=300 --seed=7
    python -m tests.laboratory builds --seed=7 --only=17      # one of them again

builds: a corpus of a drawn format is built with a drawn vocabulary, packing, limits and filters.
The cache must hold what tests/laboratory/oracle.py expects, byte by byte of every file. The same
build, whole or in parts, is ended at drawn moments and resumed, extended and killed, documents are
taken down and killed, files of the cache and of the corpus are damaged: each time the files must be
those of the undisturbed commands, and the oracle's. The commands run in forks of one process that
has imported everything; with --large, in fresh processes with workers, on megabytes of texts, and
every fault of tests/laboratory/faults.py is injected.

runs: a model, objective, mixture, optimizer and what saves and evaluates are drawn for a run of 6
to 12 updates, or with --cache_dir one run is given. The windows of its batches must be the cache's,
each once an epoch. The same run is ended at drawn moments and resumed: states and metrics must be
equal, bit for bit. A damaged checkpoint must be named, and the newest sound one resumed from; a
second run in the same folder and an edited task must be refused. `evaluate` must find the run's
losses, and `compare` and `explain` agree.

followed: runs follow builds of a corpus, and builds, runs or both are ended.

recipes: a recipe is ended in each of its stages, and run again until it is finished.

tokenizers: byte-level BPE, BPE, unigram and WordPiece with drawn rules and pieces. The ids of
random texts must be those of `tokenizers` or SentencePiece.

configs: the config.json of a small model that transformers wrote loses fields, or gets fields of
other spellings, kinds and types. Our logits must equal transformers'; otherwise, one line
refuses the file.

No command may print a traceback. Prints what was tried, the seed, and for each difference the
command that draws it again; its folder is kept. Exits with 1 if there is a difference.
"""

import argparse
import importlib
import itertools
import json
import os
import pathlib
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

from tasks.terminal import progress
from tasks.terminal.command_line import UserError, run
from tasks.terminal.table import table
from tests.laboratory.commands import Difference, in_forks

# Trials of each kind; 0: as many as it takes for --kills.
_COUNTS = {
    "builds": 300,
    "runs": 60,
    "followed": 0,
    "recipes": 0,
    "tokenizers": 200,
    "configs": 300,
}


def at_least(least: int):
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return int(text)

    return number


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    value = (int(low), int(high or low))
    if not 0 < value[0] <= value[1]:
        raise argparse.ArgumentTypeError(f"{text} is not a range such as 1-4")
    return value


def command_line() -> argparse.ArgumentParser:
    described = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser("python -m tests.laboratory", description=described)
    commands = parser.add_subparsers(dest="what", required=True)
    add = {name: commands.add_parser(name, allow_abbrev=False).add_argument for name in _COUNTS}
    for name, count in _COUNTS.items():
        says = f"default: {count}" if count else "default: until there were --kills"
        add[name]("--count", type=at_least(1), default=count, help=f"number of {name} ({says})")
        add[name]("--seed", type=int, help="of all random choices; drawn and printed if not set")
        add[name]("--only", type=int, help=f"only this one of the {name}, from 0")
        add[name]("--minutes", type=float, help="begin no further ones after this time")
        add[name]("--jobs", type=at_least(1), default=2, help="number at the same time")
        add[name]("--output", help="a new folder, kept afterwards; temporary, but for differences")
        add[name]("--verbose", action="store_true", help="print what each of them tried")
    build = add["builds"]
    build("--large", action="store_true", help="fresh processes, megabytes, and every fault")
    build("--kills", type=at_least(0), default=24, help="signals that end each large build")
    build("--workers", type=_range, default=(1, 4), help="of a large build: N or MIN-MAX")
    build("--corpus_bytes", type=at_least(1), default=4 << 20, help="of a large build, about")
    for name in ("runs", "followed", "recipes"):
        says = "of the given run" if name == "runs" else "at least"
        add[name]("--kills", type=at_least(0), default=10, help=f"number of kills, {says}")
    for name in ("runs", "followed"):
        add[name]("--task", default="python_docs_span_corruption", help="task of the caches")
        add[name]("--preset", default="t5_1_1_tiny", help="model preset, see trainer.pretrain")
        add[name]("--steps", type=at_least(20), default=200, help="updates of a run, 20 or more")
    add["runs"]("--cache_dir", help="folder of caches: one run of --task instead of drawn ones")
    add["runs"]("--damages", type=at_least(0), default=5, help="damaged checkpoints of that run")
    add["followed"]("--vocabulary", required=True, help="vocabulary of the caches")
    add["followed"]("--corpus", default="python_docs", help="corpus SPEC")
    add["followed"]("--shard_bytes", type=at_least(1), default=56 << 10, help="bytes a shard")
    add["recipes"]("--recipe", default="recipes/demo.toml", help="recipe to run")
    texts = "random texts for each of them"
    add["tokenizers"]("--texts", type=at_least(1), default=100_000, help=texts)
    return parser


def _module(what: str) -> ModuleType:
    """Imports what a command needs, JAX with the settings of the tests."""
    import tests.conftest  # noqa: F401 - sets JAX's environment

    return importlib.import_module(f"tests.laboratory.{what}")


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if there is a difference."""
    flags, flags.settings = command_line().parse_known_args(argv)
    if flags.settings and not (flags.what == "followed" or getattr(flags, "cache_dir", None)):
        raise UserError(f"unknown flag {flags.settings[0]}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells' background jobs ignore Ctrl-C, and so would what is started here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    flags.seed = int.from_bytes(os.urandom(3)) if flags.seed is None else flags.seed
    folder = pathlib.Path(flags.output or tempfile.mkdtemp(prefix="laboratory-")).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose a new folder for --output")
    folder.mkdir(parents=True, exist_ok=True)
    begin, what = time.monotonic(), flags.what
    if what == "runs" and flags.cache_dir:
        what, flags.count = "given_run", 1  # its trial makes all kills
    module = _module(what)
    again = _again(argv, flags.seed)
    print(again, flush=True)
    try:
        if hasattr(module, "warm"):
            module.warm(flags, folder / "shared")
    except Difference as error:
        raise UserError(f"nothing to compare with: {error}") from error
    outcome, counts = Counter[str](), Counter[str]()

    def numbers() -> Iterator[int]:
        for number in itertools.count() if flags.only is None else [flags.only]:
            late = flags.minutes and time.monotonic() > begin + 60 * flags.minutes
            enough = number >= flags.count if flags.count else counts["kills"] >= flags.kills
            if flags.only is None and (late or (enough and number)):
                return
            if outcome["differences"] and not flags.count:
                return
            yield number

    def work(number: int) -> str:
        trial = module.Trial(flags, number, folder)
        text = trial.run()
        trial.clean()
        return json.dumps([text, getattr(trial, "counts", {})])

    with progress.shown(flags.what, flags.count or flags.kills) as bar:
        for number, equal, text in in_forks(work, numbers(), folder, flags.jobs):
            outcome["equal" if equal else "differences"] += 1
            if equal:
                text, more = json.loads(text.splitlines()[-1])
                counts.update(more)
            if not equal or flags.verbose:
                print(f"{number}: {text}", flush=True)
            if not equal:
                kept = f"{number}: kept in {folder / str(number)}; {again} --only={number}"
                print(kept, file=sys.stderr)
            done = outcome.total() if flags.count else counts["kills"]
            bar.update(done, f"{outcome['differences']} differences")
    if counts:
        print(table(("what", "times"), sorted(counts.items()), markdown=True) + "\n")
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{outcome.total()} random {flags.what}, {outcome['differences']} differences, seed "
        f"{flags.seed}, {minutes:.1f} minutes"
    )
    if not (outcome["differences"] or flags.output):
        shutil.rmtree(folder)
    return 1 if outcome["differences"] else 0


def _again(argv: list[str], seed: int) -> str:
    left_out = ("--seed", "--only", "--output", "--jobs")
    words = [word for word in argv if not word.startswith(left_out)]
    return shlex.join(["python", "-m", "tests.laboratory", *words, f"--seed={seed}"])


if __name__ == "__main__":
    run(main)
