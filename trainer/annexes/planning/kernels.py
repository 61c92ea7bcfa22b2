"""Pallas kernels of a traced program, which alone has their names, grids and layouts."""

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.annexes.planning.hlo import Instruction, arrays, first_group
from trainer.annexes.planning.schedules import Schedule
from trainer.model.attention_cores import VISITED

_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")


class Kernel(NamedTuple):
    """A Pallas kernel in a traced program.

    `grid` is (groups, steps) if there are several axes, else (steps,); `shapes` are the operands',
    then the results', on one device; `bytes` is their total size. `visited` is the number of
    visited tiles relative to a causal mask's, in layouts that skip tiles; else 1. A kernel may say
    its `bytes`, if it reads or writes parts of arrays, and the `flops` of its products.
    """

    name: str
    grid: tuple[int, ...]
    runs: int
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    visited: float = 1.0
    flops: int = 0

    def cycles(self, schedule: Schedule, cores: int = 1) -> int:
        """Returns the cycles of one run on a device whose cores share the groups."""
        groups, *steps = self.grid if len(self.grid) > 1 else (1, *self.grid)
        every = -(-groups // cores), math.prod(steps)
        return round(schedule.cycles(*every, self.visited))


def kernels(jaxpr: Any) -> list[Kernel]:
    """Returns the kernels of a jaxpr, equal ones merged; both branches of a `cond` count."""
    found: dict[tuple, Kernel] = {}
    for equation, runs in _calls(jaxpr, 1):
        grid = tuple(equation.params["grid_mapping"].grid)
        avals = [variable.aval for variable in (*equation.invars, *equation.outvars)]
        # A kernel without a name has its function's.
        name = equation.params["name"] or equation.params["jaxpr"].debug_info.func_name
        shapes = tuple(aval.shape for aval in avals)
        moved = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
        visited = float(dict(equation.params.get("metadata") or {}).get(VISITED, 1.0))
        estimate = equation.params["cost_estimate"]
        flops = estimate.flops if estimate else 0
        moved = estimate.bytes_accessed if estimate else moved
        key = name, grid, shapes, moved, visited, flops
        known = found.get(key, Kernel(name, grid, 0, shapes, moved, visited, flops))
        found[key] = known._replace(runs=known.runs + runs)
    return list(found.values())


def kernel_of(call: Instruction, traced: list[Kernel]) -> Kernel | None:
    """Returns the kernel that a custom call runs; None if it was not traced."""
    given = arrays(first_group(_OPERANDS, call.attributes))
    shapes = tuple(array.dimensions for array in (*given, *call.arrays))
    # A GPU's compiler keeps the name in the operation's path only.
    name = f"{call.name} {call.op_name}"
    return next((each for each in traced if each.name in name and each.shapes == shapes), None)


def _calls(jaxpr: Any, runs: int) -> Iterator[tuple[Any, int]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation, runs
            continue
        repeats = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else (parameter,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _calls(inner, runs * repeats)
