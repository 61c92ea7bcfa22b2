"""The parameters of a checkpoint, or their average: `--average` of all commands that read one."""

import sys
from typing import Any

import jax
import numpy as np

from tasks.terminal.command_line import UserError
from trainer.checkpoints.checkpoint import Checkpoints, chosen_steps
from trainer.config.averages import last_count
from trainer.engine import processes
from trainer.engine.program import Program

# The parts of an array that this process holds, in float64, by their place.
_Sums = list[dict[str, np.ndarray]]


def steps_of(text: str, checkpoints: Checkpoints, model_dir: str, average: str | None) -> list[int]:
    """Returns the steps that `--steps` selects; of all, those with enough checkpoints to average.

    Raises a UserError for a step that the run lacks, or that has too few before it.
    """
    known = checkpoints.steps()
    steps = chosen_steps(text, known, model_dir)
    count = (average and last_count(average)) or 1
    if text == "all" and 1 < count <= len(known):
        if processes.is_first():
            early = ", ".join(map(str, known[: count - 1]))
            print(f"--average={average}: too few checkpoints up to step {early}", file=sys.stderr)
        return known[count - 1 :]
    for step in steps:
        _mean_steps(known, step, count)
    return steps


def parameters(checkpoints: Checkpoints, step: int, program: Program, average: str | None) -> Any:
    """Returns the parameters of the checkpoint at `step`, or their `average` "last:K".

    Parameters are a state's; LoRA's factors are averaged, not their products. Raises a UserError if
    there are too few checkpoints.
    """
    count = average and last_count(average)
    if not count:
        return checkpoints.restore(step, program.abstract_state()).params
    return _mean(checkpoints, step, program, count)


def _mean_steps(known: list[int], step: int, count: int) -> list[int]:
    """Returns the newest `count` steps up to `step`; raises a UserError if there are fewer."""
    steps = [each for each in known if each <= step][-count:]
    if len(steps) < count:
        raise UserError(
            f"--average=last:{count}: up to step {step} there are only {len(steps)} checkpoints; "
            "choose a later step or fewer, or keep more with --checkpoint.keep"
        )
    return steps


def _mean(checkpoints: Checkpoints, step: int, program: Program, count: int) -> Any:
    """Returns the mean of the newest `count` checkpoints up to `step`.

    It is summed in float64 from the oldest to the newest, divided, and rounded once, element by
    element, so that it does not depend on devices.
    """
    steps = _mean_steps(checkpoints.steps(), step, count)
    if processes.is_first():
        print(f"averaging checkpoints {', '.join(map(str, steps))}", file=sys.stderr)
    abstract, sums = program.abstract_state(), None
    for each in steps:
        sums = _added(sums, jax.tree.leaves(checkpoints.restore(each, abstract).params))
    assert sums is not None

    def mean(like: Any, parts: dict[str, np.ndarray]) -> jax.Array:
        return jax.make_array_from_callback(
            like.shape,
            like.sharding,
            lambda index: (parts[str(index)] / count).astype(like.dtype),
        )

    leaves, structure = jax.tree.flatten(abstract.params)
    return jax.tree.unflatten(structure, list(map(mean, leaves, sums)))


def _added(sums: _Sums | None, leaves: list[jax.Array]) -> _Sums:
    """Adds this process's parts of arrays to `sums`; replicas of a part count once."""
    found = []
    for place, leaf in enumerate(leaves):
        parts = {str(shard.index): shard.data for shard in leaf.addressable_shards}
        new = {index: np.asarray(part, np.float64) for index, part in parts.items()}
        old = sums[place] if sums else {}
        found.append({index: old[index] + part if old else part for index, part in new.items()})
    return found
