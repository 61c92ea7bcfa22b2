"""Says where two runs first differ: configuration, data, step, tensor.

    python -m trainer.compare RUN_A RUN_B [--json] [--verify=none|newest|all]

Configurations and records come first, then batches, made again from the caches where anything that
they are made of differs, then metrics and checkpoints, bit for bit. Exit code 0: the runs are the
same, 1: they differ, 2: they cannot be compared. Fields that have no effect on results, and
software, are shown and do not count.
"""

from __future__ import annotations

import json
import sys

from tasks.terminal import command_line
from tasks.terminal.command_line import Parser, UserError

EXIT_DIFFERENT = 1


def main(argv: list[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)

    from trainer.comparing import verdict, words
    from trainer.reporting.metrics import finite

    folders = flags.run_a, flags.run_b
    caches = flags.cache_dir or [None, None]
    if len(caches) != 2:
        raise UserError("--cache_dir: give it twice, for RUN_A and for RUN_B")
    if flags.batches < -1:
        raise UserError(f"--batches={flags.batches}: give a number of updates, or -1 for all")
    found = verdict.compare(folders, tuple(caches), flags.batches, flags.verify)
    as_json = finite(verdict.as_json(found))
    print(json.dumps(as_json, indent=1) if flags.json else words.text(found))
    return EXIT_DIFFERENT if found.first else 0


def _parser() -> Parser:
    parser = Parser(prog="python -m trainer.compare", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_a", metavar="RUN_A", help="folder of a run, local or remote")
    add("run_b", metavar="RUN_B", help="folder of the other run")
    add("--json", action="store_true", help="print JSON")
    add(
        "--batches",
        type=int,
        default=0,
        help="compare the batches of so many updates even if everything that they are made of is "
        "equal; -1: of all",
    )
    add(
        "--verify",
        choices=("none", "newest", "all"),
        default="newest",
        help="checkpoints whose arrays are read although their checksums are equal",
    )
    add(
        "--cache_dir",
        action="append",
        help="folder of caches by task, if they were moved; given twice, for each run",
    )
    return parser


if __name__ == "__main__":
    command_line.run(main, sys.argv[1:])
