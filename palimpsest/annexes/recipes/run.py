"""Runs a recipe: all stages from a corpus to a model, in one file.

    palimpsest run RECIPE.toml
    palimpsest run demo --show    # one of those that `palimpsest recipes` lists

A table of the file is a stage, and its keys are the flags of the stage's command. Folders, tasks
and lengths that one stage decides flow to the next. Run the same command to resume: finished stages
are kept, and each of the others resumes as its command does.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import ReadIf, field

if TYPE_CHECKING:
    from palimpsest.annexes.recipes.recipe import Recipe, Stage

_OF_PARTS = ("only", "start", "until", "redo", "locked", "show")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    recipe: str = field(
        "",
        "the recipe, a TOML file, or the name of one that `palimpsest recipes` lists",
        positional=True,
        metavar="RECIPE.toml",
    )
    folder: str | None = field(
        None,
        "folder to write to, local or remote; None: the recipe's folder, else its name",
    )
    show: bool = field(False, "print the stages' commands, which can be copied, and run nothing")
    rehearse: bool = field(
        False,
        "find mistakes in two minutes: run all stages in a temporary folder, on a sample and with "
        "a small model",
    )
    plan: bool = field(
        False,
        "print the size, time and price of every stage, and what is finished, and run nothing",
    )
    topology: str | None = field(
        None,
        "TPU slice or GPUs, as in palimpsest plan, on which --plan prices the runs, and on which "
        "--rehearse checks that they fit",
        metavar="NAME",
        read_if=ReadIf(lambda flags: flags.plan or flags.rehearse, "without --plan or --rehearse"),
    )
    only: str | None = field(None, "run this stage alone", metavar="STAGE")
    start: str | None = field(None, "run from this stage on", metavar="STAGE", aliases=("from",))
    until: str | None = field(None, "run up to this stage", metavar="STAGE")
    redo: bool = field(
        False,
        "remove what stages with changed keys made, and run these and all that follow from them",
    )
    locked: bool = field(
        False, "refuse whatever differs from the lock file, RECIPE.lock, instead of writing it"
    )


def run(flags: Flags) -> int:
    """Runs the stages that are left; returns the exit code of the first that fails."""
    if not flags.recipe:
        raise UserError("name a recipe: a file, or one that palimpsest recipes lists, such as demo")

    from palimpsest.annexes.recipes import lock, planning, recipe, running
    from palimpsest.annexes.recipes.rehearsals import rehearsal

    for way in ("rehearse", "plan"):
        others = [name for name in _OF_PARTS if getattr(flags, name) and getattr(flags, way)]
        if others:
            name = "from" if others[0] == "start" else others[0]
            raise UserError(f"--{way} is of all stages: leave out --{name}")
    if flags.rehearse:
        return rehearsal.rehearse(flags.recipe, flags.folder, flags.topology)
    read = recipe.read(flags.recipe, flags.folder)
    if flags.plan:
        return planning.plan(read, flags.topology)
    chosen = _chosen(read, flags)
    if flags.show:
        for stage in chosen:
            print(f"palimpsest {shlex.join(stage.line)}")
        return 0
    before = lock.read(read) if flags.locked else None
    if before:
        lock.check_stages(read, chosen, before)
    return running.run(read, chosen, flags.redo, before)


def _chosen(read: "Recipe", flags: Flags) -> "Sequence[Stage]":
    stages = list(read.stages)
    if flags.only:
        if flags.start or flags.until:
            raise UserError("--only is one stage: leave out --from and --until")
        return [read.stage(flags.only, "only")]
    first = stages.index(read.stage(flags.start, "from")) if flags.start else 0
    last = stages.index(read.stage(flags.until, "until")) if flags.until else len(stages)
    if first > last:
        raise UserError(f"--from={flags.start} comes after --until={flags.until}")
    return stages[first : last + 1]


main = Command(Flags, run, waits=True)

if __name__ == "__main__":
    main.start()
