"""Injects faults of every known kind into builds and audits the caches: `python -m pipeline.chaos`.

    python -m pipeline.chaos --vocabulary=DIR --kills=100 --workers=1-4 --seed=7
    python -m pipeline.chaos --vocabulary=DIR --kills=20 --format=csv
    python -m pipeline.chaos --vocabulary=DIR --kills=20 --pools=3     # see pipeline.faults.pools

One build runs without faults. Other builds are killed, run out of disk, lose corpus files or have
finished files damaged, and are rerun by the same command until they succeed; every file must then
have the same sha256 as in the first cache. Everything happens on a copy of (the beginning of) the
corpus, in a folder of its own. Prints a Markdown table; exits with 1 if anything differs.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import tempfile
import time

from pipeline.faults import corpora, local
from pipeline.faults.harness import Harness, Outcome
from tasks.terminal import progress
from tasks.terminal.command_line import Parser, UserError, positive, run
from tasks.terminal.table import table
from tasks.vocabulary import FORMS


def _table(outcomes: list[Outcome]) -> str:
    """Returns the outcomes as a Markdown table."""
    header = (
        *("fault", "times", "while rows were written", "caches equal", "documents lost"),
        *("documents duplicated", "finished shards redone"),
    )
    rows = [
        (
            *(each.fault + (f" ({each.note})" if each.note else ""), each.injected),
            *(each.while_writing, f"{each.equal} of {each.caches}", each.lost),
            *(each.duplicated, each.redone),
        )
        for each in outcomes
    ]
    return table(header, rows, markdown=True)


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    value = (positive(low), positive(high or low))
    if value[0] > value[1]:
        raise argparse.ArgumentTypeError(f"{text} is not a range such as 1-4")
    return value


def command_line() -> Parser:
    """Returns the command's parser."""
    parser = Parser(prog="python -m pipeline.chaos", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--vocabulary", required=True, help=FORMS)
    add("--extra_ids", type=int, default=0, help="sentinels to add to a vocabulary that has none")
    add(
        "--task",
        default="python_docs_span_corruption",
        help="a registered task; of pairs, it is always supervised",
    )
    add("--corpus", default="python_docs", help="corpus SPEC to copy the documents from")
    add("--format", choices=corpora.FORMATS, default="json", help="format of the copy")
    add("--corpus_bytes", type=positive, default=4 << 20, help="most bytes of documents to copy")
    add("--shard_bytes", type=positive, default=128 << 10, help="approximate corpus bytes a shard")
    add("--kills", type=int, default=100, help="number of SIGKILLs")
    add("--others", type=int, default=5, help="number of injections of each other fault")
    add("--workers", type=_range, default="1-4", help="worker processes per build: N or MIN-MAX")
    add(
        "--pools",
        type=int,
        default=0,
        help="if above 0, build by Beam's portable runner with this many worker pools, and inject "
        "only kills of workers, pools and the job service",
    )
    add("--jobs", type=positive, default=os.cpu_count(), help="builds that run at the same time")
    add("--seed", type=int, default=0, help="seed of all random choices; exact timing still varies")
    add("--output", help="a new folder for the builds, kept afterwards; temporary if not set")
    return parser


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if a cache differs or a build behaved wrongly."""
    flags = command_line().parse_args(argv)
    begin = time.monotonic()
    # Exit by an exception, so that pools are ended and temporary folders removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        folder = flags.output or stack.enter_context(tempfile.TemporaryDirectory())
        path = pathlib.Path(folder).absolute()
        if path.exists() and any(path.iterdir()):
            raise UserError(f"{folder} is not empty: choose a new folder for --output")
        path.mkdir(parents=True, exist_ok=True)
        harness = Harness(flags, path)
        if flags.pools:
            from pipeline.faults import pools

            cluster = stack.enter_context(pools.Cluster(flags.pools, path))
            harness.runner = cluster.flags
            outcomes = harness.run_trials(cluster.faults(flags.kills), parallel=1)
            workers = f"a worker in each of {flags.pools} pools"
        else:
            faults = local.faults(flags.kills, flags.others, of_texts=not harness.sides)
            outcomes = harness.run_trials(faults, flags.jobs)
            workers = "{} to {} workers".format(*flags.workers)
    print(_table(outcomes))
    injected = sum(outcome.injected for outcome in outcomes)
    print(
        f"\n{injected} faults in builds of {harness.corpus_bytes / 1e6:.1f} MB into "
        f"{sum(harness.plan.shards.values())} shards by {workers} on {os.cpu_count()} cores, seed "
        f"{flags.seed}, in {progress.clock(time.monotonic() - begin)}"
    )
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    run(main)
