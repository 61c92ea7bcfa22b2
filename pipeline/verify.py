"""Checks every byte of a finished cache.

    python -m pipeline.verify --cache=DIR

It checks files against their checksums, records against their CRCs, and files against each other:
records, row index, lineage, counts, manifest, vocabulary, and what stock seqio reads. It needs
neither the corpus nor a token for it. Each worker holds the index and lineage of one shard and a
megabyte of its records at a time. Remote files are read once and not stored.
"""

import dataclasses
import os
import tempfile

from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, at_least, field
from tasks.terminal.table import table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cache: str = field(REQUIRED, "folder of the cache: CACHE_DIR/TASK", metavar="DIR", bare=True)
    workers: int = field(os.cpu_count() or 1, "maximum worker processes", rule=at_least(1))
    exclude: str | None = field(
        None,
        "exclude lists or text files of ids, separated by commas; the cache may not contain a "
        "document on any of these or of its own lists",
        joined=",",
    )


def run(flags: Flags) -> int:
    """Prints faults and counts; returns 1 if there is a fault."""
    from pipeline.exclusion.lists import given
    from pipeline.verification.cache import verify

    with tempfile.TemporaryDirectory() as scratch:
        lists = given(flags.exclude, scratch)
        splits, faults, absences = verify(flags.cache, flags.workers, lists)
    for fault in faults:
        print(fault)
    columns = ("documents", "tokens", "rows", "dropped", "size")
    rows = [
        (split, *(f"{getattr(checked, column):,}" for column in columns))
        for split, checked in splits.items()
    ]
    print(table(("", *columns), rows))
    print(f"{flags.cache}: {len(faults)} faults" if faults else f"{flags.cache}: verified")
    for absence in () if faults else absences:
        print(absence)
    return 1 if faults else 0


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
