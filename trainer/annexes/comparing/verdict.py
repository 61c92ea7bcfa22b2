"""Compares two runs layer by layer."""

import dataclasses
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.annexes.comparing import data, settings, steps, tensors
from trainer.checkpoints import stored
from trainer.reporting import history
from trainer.reporting.history import History
from trainer.reporting.metrics import finite

CONFIGURATION, DATA, STEP, TENSOR = "configuration", "data", "step", "tensor"


@dataclasses.dataclass
class Verdict:
    """The findings of a comparison; `software` lists each difference as (name, value, value)."""

    runs: tuple[History, History]
    settings: list[settings.Setting]
    software: list[tuple[str, Any, Any]]
    data: data.Compared
    steps: steps.Compared
    tensors: tensors.Compared

    @property
    def differing(self) -> list[str]:
        """The layers that differ, in the order of causes."""
        found = {
            CONFIGURATION: any(setting.effect != settings.NONE for setting in self.settings),
            DATA: bool(self.data.records or self.data.batch),
            STEP: self.steps.first is not None,
            TENSOR: self.tensors.step is not None,
        }
        return [name for name, differs in found.items() if differs]

    @property
    def first(self) -> str:
        """The first layer that differs; "" if the runs are the same."""
        return next(iter(self.differing), "")


def compare(
    folders: tuple[str, str],
    cache_dirs: tuple[str | None, str | None] = (None, None),
    batches: int = 0,
    verify: str = "newest",
) -> Verdict:
    """Compares two runs up to the last update that both have reached.

    `batches` is the number of updates whose batches are compared even without a suspected
    difference (-1: all), `verify` is as in `tensors.compare`, and `cache_dirs` are the runs'
    cache folders, if moved.
    """
    one, other = history.load(folders[0], "A"), history.load(folders[1], "B")
    changed = settings.compare(one, other)
    of_steps = steps.compare(one, other)
    of_tensors = tensors.compare(folders, verify)
    last = min(_last(each) for each in (one, other))
    of_data = data.records(one, other, last)
    try:
        made = data.Batches(one, other, cache_dirs)
    except UserError as error:
        if batches:
            raise
        of_data.notes.append(f"batches cannot be made again: {error}")
        of_data.lost = True
    else:
        of_data.records += made.shards()
        of_data.notes += made.changed_since()
        suspected = settings.of_data(changed) or bool(of_data.records)
        span = _span(suspected, of_steps, batches, last)
        branches = [each.config.branch[1] for each in (one, other) if each.config.branch]
        if span and branches:
            # The run that they branched from made the updates before.
            span = max(span[0], *(step + 1 for step in branches)), span[1]
            span = span if span[0] <= span[1] else None
        if span:
            of_data.batch = made.first_difference(*span)
            of_data.compared = span
    software = settings.software(one, other)
    return Verdict((one, other), changed, software, of_data, of_steps, of_tensors)


def _span(
    suspected: bool, metrics: steps.Compared, batches: int, last: int
) -> tuple[int, int] | None:
    if suspected or batches < 0:
        span = (1, last)
    elif batches:
        span = (1, min(batches, last))
    elif metrics.first:
        # The updates between the last equal and the first differing report.
        span = (metrics.first.after + 1, metrics.first.step)
    else:
        return None
    return span if span[0] <= span[1] else None


def _last(run: History) -> int:
    return max([run.step, *stored.steps(run.folder)])


def as_json(found: Verdict) -> dict[str, Any]:
    """Returns a verdict as JSON values, with non-finite numbers as strings."""
    values = {
        "runs": [run.folder for run in found.runs],
        "same": not found.first,
        "first": found.first or None,
        "differing": found.differing,
        "configuration": [setting._asdict() for setting in found.settings],
        "software": [list(each) for each in found.software],
        "data": dataclasses.asdict(found.data),
        "step": {
            "lines": found.steps.lines,
            "last": found.steps.last,
            "first": found.steps.first and found.steps.first._asdict(),
        },
        "tensor": dataclasses.asdict(found.tensors),
    }
    return finite(values)
