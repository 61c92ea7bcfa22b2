"""Finds where two runs first differ.

    palimpsest compare RUN_A RUN_B [--json] [--verify=none|newest|all]

Configurations and records are compared first, then batches, which are made again from the caches if
anything behind them differs, then metrics and checkpoints, bit for bit. The exit code is 0 if the
runs are the same, 1 if they differ and 2 if they cannot be compared. Software, and fields that have
no effect on results, are shown but do not count.
"""

import dataclasses
import json

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, at_least, field

EXIT_DIFFERENT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    run_a: str = field(REQUIRED, "folder of a run, local or remote", positional=True)
    run_b: str = field(REQUIRED, "folder of the other run", positional=True)
    json: bool = field(False, "print JSON")
    batches: int = field(
        0,
        "number of updates whose batches are compared even if everything that they are made from "
        "is equal; -1: all",
        rule=at_least(-1),
    )
    verify: str = field(
        "newest",
        "checkpoints whose arrays are read even if their checksums are equal",
        choices=("none", "newest", "all"),
    )
    cache_dir: tuple[str, ...] = field(
        (),
        "folder of the tasks' caches, if they have moved; given twice, for RUN_A and for RUN_B",
        repeated=True,
    )


def run(flags: Flags) -> int:
    """Prints the first difference; returns 1 if there is one."""
    from trainer.annexes.comparing import verdict, words

    folders = flags.run_a, flags.run_b
    caches: tuple[str | None, ...] = flags.cache_dir or (None, None)
    if len(caches) != 2:
        raise UserError("--cache_dir: give it twice, for RUN_A and for RUN_B")
    found = verdict.compare(folders, (caches[0], caches[1]), flags.batches, flags.verify)
    print(json.dumps(verdict.as_json(found), indent=1) if flags.json else words.text(found))
    return EXIT_DIFFERENT if found.first else 0


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
