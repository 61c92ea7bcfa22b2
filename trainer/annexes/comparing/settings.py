"""Differences between two runs' configurations and software, by effect on results."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.config import Config, changes
from trainer.config.resuming import changes_in
from trainer.config.unused_fields import unread_fields
from trainer.reporting.history import History, differences

# A field changes results, changes them only by rounding, or leaves every bit the same.
RESULTS, ROUNDING, NONE = "results", "rounding", "none"


class Setting(NamedTuple):
    """A field whose values differ, and its effect: RESULTS, ROUNDING or NONE."""

    path: str
    values: tuple[Any, Any]
    effect: str


def compare(one: History, other: History) -> list[Setting]:
    """Returns the differing fields, those with the greatest effect first."""
    configs = one.config, other.config
    idle = unread_fields(one.config).keys() & unread_fields(other.config).keys()
    found = [
        Setting(path, (values[0], values[1]), effect(path, path in idle, *configs))
        for path, values in differences([one, other])
    ]
    return sorted(found, key=lambda each: (RESULTS, ROUNDING, NONE).index(each.effect))


def effect(path: str, idle: bool = False, *configs: Config) -> str:
    """Returns the effect of a field on results of such runs; none of them reads `idle` fields."""
    changed, _ = changes_in(path, *configs)
    # A field that changes something "later" affects the results of a whole run, even if idle.
    if changed == "nothing" or (idle and changed not in ("later", "later_batches")):
        return NONE
    return ROUNDING if changed == "rounding" else RESULTS


def of_data(found: Sequence[Setting]) -> bool:
    """Returns whether a field that determines batches differs."""
    return any(
        changes(each.path) in ("batches", "later_batches") and each.effect != NONE for each in found
    )


def software(one: History, other: History) -> list[tuple[str, Any, Any]]:
    """Returns (name, value, value) of differing software and hardware at the last starts."""
    sides = [each.environment for each in (one, other)]
    names = dict.fromkeys([*sides[0], *sides[1]])
    return [
        (name, sides[0].get(name), sides[1].get(name))
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    ]
