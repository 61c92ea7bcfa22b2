"""Exclude lists given to a command, and the corpora that it reads.

A list of ids names the documents of any corpus that have these ids. A list of duplicates knows its
files: it fits a corpus that has them under the same names. The slot "exclude_lists" may fit others.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pipeline.exclusion.lists import ExcludeList, Given
from pipeline.exclusion.origins import Origin
from tasks import annexes
from tasks.cache.filtered import ExcludeRecord
from tasks.terminal.command_line import UserError

SLOT = "exclude_lists"


@dataclasses.dataclass(frozen=True)
class Target:
    """A corpus that a command reads: its origin, its record, and the lists in force for it."""

    origin: Origin
    record: Mapping[str, Any]
    in_force: Collection[ExcludeRecord] = ()


def fitted(
    given: Sequence[Given], targets: Mapping[str, Target], scratch: str
) -> dict[str, list[Given]]:
    """Returns the lists for each corpus; raises a UserError for one of other files."""
    for each in given:
        if each.record.paragraphs and any("inputs" in one.record for one in targets.values()):
            raise UserError(
                f"--exclude={each.named} has paragraphs, but the corpus has pairs: give a list of "
                "documents"
            )
    if given and (translated := annexes.get(SLOT, "translated")):
        return translated(given, targets, scratch)
    for each in given:
        for target in targets.values():
            if each.record not in target.in_force and not _is_of(ExcludeList(each.path), target):
                raise UserError(
                    f"--exclude={each.named} was made from other files than those of "
                    f"{target.origin.corpus}: make the list from this corpus"
                )
    return {key: list(given) for key in targets}


def _is_of(opened: ExcludeList, target: Target) -> bool:
    """Returns whether a list has ids alone, or is of files that the corpus has."""
    if not opened.origins:  # or of files, in version 0.2.0
        return not len(opened) or "files" not in opened.header
    theirs = {(file.name, file.bytes, file.state) for file in target.origin.files}
    return {(file.archive, file.bytes, file.state) for file in opened.files} <= theirs
