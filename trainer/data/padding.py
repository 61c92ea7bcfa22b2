"""Describes how full rows are, and finds lengths that would leave less padding."""

from collections.abc import Callable

from tasks.objectives import Lengths
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from trainer.data.features import Batch, filling

# Below this fill of any side, a batch gets advice on lengths.
WASTEFUL = 0.9


def packing(batch: Batch) -> str:
    """Returns how full a batch is: "inputs 100.0% full, targets 99.8% full"."""
    shares = filling(batch).items()
    return ", ".join(f"{name.removesuffix('_full')} {share:.1%} full" for name, share in shares)


def better_lengths(task: TaskSpec, lengths: Lengths) -> str:
    """Returns advice on lengths that leave less padding; "" if there are none."""

    def window(inputs: int, targets: int) -> int:
        try:
            return task.objective.window_tokens(Lengths(inputs, targets))
        except UserError:
            return 0

    advice = []
    now = window(lengths.inputs, lengths.targets)
    shorter = _first(lambda n: window(lengths.inputs, n) >= now, 1, lengths.targets)
    if shorter < lengths.targets:
        advice.append(f"--lengths.targets={shorter} holds the same text")
    if lengths.inputs:
        # Inputs for these targets; more than 64 times as long is never useful.
        most = 64 * lengths.inputs
        too_long = _first(lambda n: not window(n, lengths.targets), lengths.inputs, most)
        if lengths.inputs < too_long - 1 < most - 1:
            advice.append(f"--lengths.inputs={too_long - 1} fills these targets")
    return f" (padding: {', or '.join(advice)})" if advice else ""


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the lowest number from `low` to `high` for which `holds` is true, else `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
