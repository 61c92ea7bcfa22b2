"""Checks every byte of a finished cache: `python -m pipeline.verify --cache=DIR`.

It checks files against their checksums, records against their CRCs, and files against each other:
records, row index, lineage, counts, manifest, vocabulary, and what stock seqio reads. Neither the
corpus nor a token for it is needed. Each worker holds one shard's index and lineage and one record
at a time, so memory does not grow with the cache. Remote files are read once and not stored.
"""

import os

from pipeline.verification.cache import verify
from tasks.terminal.command_line import Parser, positive, run
from tasks.terminal.table import table


def main(argv: list[str]) -> int:
    """Runs the command; returns 1 if there is a fault."""
    parser = Parser(prog="python -m pipeline.verify", description=__doc__.splitlines()[0])
    parser.add_argument("--cache", required=True, help="folder of the cache: CACHE_DIR/TASK")
    parser.add_argument(
        "--workers", type=positive, default=os.cpu_count(), help="most worker processes"
    )
    flags = parser.parse_args(argv)
    splits, faults = verify(flags.cache, flags.workers)
    for fault in faults:
        print(fault)
    columns = ("documents", "tokens", "rows", "dropped", "size")
    rows = [
        (split, *(f"{getattr(checked, column):,}" for column in columns))
        for split, checked in splits.items()
    ]
    print(table(("", *columns), rows))
    print(f"{flags.cache}: {len(faults)} faults" if faults else f"{flags.cache}: verified")
    return 1 if faults else 0


if __name__ == "__main__":
    run(main)
