"""Breaks builds and runs in every known way, and checks that the results are the same.

    python -m tests.faults builds --vocabulary=DIR --kills=100 --workers=1-4 --seed=7
    python -m tests.faults builds --vocabulary=DIR --kills=20 --format=csv
    python -m tests.faults runs --cache_dir=DIR --kills=10 --damages=5 --steps=200 --seed=7
    python -m tests.faults followed --vocabulary=DIR --kills=15
    python -m tests.faults recipes --recipe=recipes/demo.toml --kills=20

builds: one build runs without faults. Other builds are killed, run out of disk, lose corpus files
or have finished files damaged, and are rerun by the same command until they succeed; every file
must then have the same SHA-256 as in the first cache. Everything happens on a copy of (the
beginning of) the corpus.

runs: one run trains undisturbed. Another run of the same configuration is ended by SIGKILL, Ctrl-C
or SIGTERM at random moments, while it starts, makes updates, evaluates or writes a checkpoint, and
restarted each time by the same command. Then files of newest checkpoints are damaged: the run must
name the newest sound one, and resume from it with `--checkpoint.on_damage=fall_back`. Last, a
second run starts in the directory of one that is going on, and a run resumes with an edited task:
both must be refused. Final states and loss curves must equal the undisturbed run's, bit for bit,
and no run may print a traceback.

followed: runs follow builds of a corpus, and builds, runs or both are ended.

recipes: a recipe is ended in each of its stages, and run again until it is finished.

Prints Markdown tables; exits with 1 if anything differs. Other flags of `runs` and `followed` are
passed on to `trainer.pretrain`.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import tempfile

from tasks.terminal.command_line import UserError, run
from tests.faults import builds, followed, recipes, runs
from tests.support import corpora

_BREAK = {
    "builds": builds.break_builds,
    "runs": runs.break_runs,
    "followed": followed.break_pairs,
    "recipes": recipes.break_recipes,
}


def _at_least(least: int):
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
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    add = {name: commands.add_parser(name, allow_abbrev=False).add_argument for name in _BREAK}
    for name in _BREAK:
        add[name]("--output", help="a new folder, kept afterwards; temporary if not set")
        if name != "recipes":
            add[name]("--task", default="python_docs_span_corruption", help="task of the caches")
        add[name]("--seed", type=int, default=0, help="of all random choices; timing still varies")
        kills = 100 if name == "builds" else 10
        add[name]("--kills", type=_at_least(0), default=kills, help="number of signals that kill")
    for name, shard_bytes in (("builds", 128 << 10), ("followed", 56 << 10)):
        add[name]("--vocabulary", required=True, help="vocabulary of the caches")
        add[name]("--corpus", default="python_docs", help="corpus SPEC")
        add[name]("--shard_bytes", type=_at_least(1), default=shard_bytes, help="bytes a shard")
    for name in ("runs", "followed"):
        add[name]("--preset", default="t5_1_1_tiny", help="model preset, see trainer.pretrain")
        add[name]("--steps", type=_at_least(20), default=200, help="updates of a run, 20 or more")
    add["recipes"]("--recipe", default="recipes/demo.toml", help="recipe to run")
    add["runs"]("--cache_dir", default="demo/cache", help="folder of caches by task")
    add["runs"]("--damages", type=_at_least(0), default=5, help="number of damaged checkpoints")
    build = add["builds"]
    build("--extra_ids", type=int, default=0, help="sentinels to add to a vocabulary without any")
    build("--format", choices=corpora.FORMATS, default="json", help="format of the corpus's copy")
    build("--corpus_bytes", type=_at_least(1), default=4 << 20, help="most bytes to copy")
    build("--others", type=int, default=5, help="number of injections of each other fault")
    build("--workers", type=_range, default=(1, 4), help="worker processes a build: N or MIN-MAX")
    build("--jobs", type=_at_least(1), default=os.cpu_count(), help="builds at the same time")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if a result differs or a command behaved wrongly."""
    flags, settings = command_line().parse_known_args(argv)
    if settings and flags.what == "builds":
        raise UserError(f"unknown flag {settings[0]}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Shells' background jobs ignore Ctrl-C, and so would what is started here.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Exit by an exception, so that processes are ended and temporary folders removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        folder = flags.output or stack.enter_context(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder).absolute()
        if path.exists() and any(path.iterdir()):
            raise UserError(f"{folder} is not empty: choose a new folder for --output")
        path.mkdir(parents=True, exist_ok=True)
        failures = _BREAK[flags.what](flags, settings, path)
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
