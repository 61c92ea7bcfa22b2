"""Cycles of Pallas kernels on a TPU, according to the compiler's static schedule.

XLA estimates the cycles of its own fusions but not of kernels, which it sees as custom calls.
libtpu can write each kernel's schedule: bundles of instructions of about one cycle each. How often
a bundle runs follows from the schedule's loops and the grid, which only the traced program has.
Schedules do not include waiting for memory.
"""

import glob
import math
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer.model.fused_tiles import VISITED
from trainer.planning.hlo import Instruction, Module, arrays, first_group

# The target of a kernel's custom call.
PALLAS = "tpu_custom_call"
# A conditional part has more bundles than this. The pipeline's own conditional parts, which start
# copies, are shorter.
_CONDITIONAL = 100
# Parts that every grid step runs are guarded too; they have at least this share of the bundles.
_WHOLE = 0.6
_BODY_TEXT = re.compile(r'"body":"([^"]*)"')
_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^{}]*\})*)\}")


class Schedule(NamedTuple):
    """The numbers of bundles that a kernel runs.

    Attributes:
      step: bundles per grid step.
      once: bundles of parts that only the first or last step of a group runs.
      inner: bundles of `step` in loops of unknown length. Such a loop is assumed to run half as
        often as the loop around it: a causal mask leaves out half of the tiles.
    """

    step: float
    once: float
    inner: float = 0.0

    def cycles(self, groups: int, steps: int, visited: float = 1.0) -> float:
        """Returns the cycles; `visited` multiplies the assumed runs of loops of unknown length."""
        step = self.step + (visited - 1.0) * self.inner
        return groups * (steps * step + self.once)


def parse_schedule(text: str) -> Schedule:
    """Parses the text of a file of final bundles."""
    address = -1
    first: dict[str, int] = {}  # region -> its first address
    jumps: list[tuple[int, str]] = []  # (address, region)
    conditions: dict[int, str] = {}  # address of a jump -> its condition
    limits: dict[str, int] = {}  # condition that ends a loop -> the loop's limit
    pipelined: set[int] = set()  # addresses that mention a stage of the grid's pipeline
    for line in text.splitlines():
        found = re.match(r"\s*(?:0x)?([0-9a-f]+)\s.*?:\s", line)
        if found:
            address = int(found[1], 16)
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            first.setdefault(region, address)
        if "stage = " in line:
            pipelined.add(address)
        for condition, region in re.findall(r"sbr\.rel \(!?(%\w+)\).*?= \$region(\d+)", line):
            jumps.append((address, region))
            conditions[address] = condition
        for condition, limit in re.findall(
            r"(%\w+) = scmp\.ge\.s32\.totalorder (?:\(!?%\w+\), )?%\w+, (\d+) /\* loop exit test",
            line,
        ):
            limits[condition] = int(limit)
    total = address + 1
    loops = sorted((first[r], a) for a, r in jumps if r in first and first[r] <= a)
    skips = [(a + 1, first[r] - 1) for a, r in jumps if r in first and first[r] > a]

    # The grid is the outermost loop, if there is more than one step; its body counts once.
    runs = [1.0] * total
    trips: dict[tuple[int, int], float] = {}
    unknown = [False] * total
    for start, end in loops:
        around = [trips[loop] for loop in trips if loop[0] <= start and end <= loop[1]]
        limit = limits.get(conditions[end])
        if not around and start in pipelined:
            trips[start, end] = 1.0
        else:
            trips[start, end] = float(limit) if limit else (around[-1] + 1) / 2
            unknown[start : end + 1] = [each or not limit for each in unknown[start : end + 1]]
        for at in range(start, end + 1):
            runs[at] *= trips[start, end]

    grid = [loop for loop in loops if loop[0] in pipelined]
    start, end = grid[0] if grid else (0, total - 1)
    once = 0.0
    for begin, after in sorted(skips):
        outside = [loop for loop in loops if loop[0] <= begin and after <= loop[1]]
        # Inside another loop, a skip only tests whether an inner loop runs at all.
        inside = all(loop[0] in pipelined for loop in outside)
        part = _CONDITIONAL < after - begin < _WHOLE * (end - start)
        # Every grid step loops over tiles, however few bundles the loop has.
        part = part and not any(unknown[begin : after + 1])
        if part and inside and start <= begin and after <= end:
            once += sum(runs[begin : after + 1])
            runs[begin : after + 1] = [0.0] * (after + 1 - begin)
    inner = sum(runs[at] for at in range(start, end + 1) if unknown[at])
    return Schedule(sum(runs[start : end + 1]), once, inner)


class Kernel(NamedTuple):
    """A Pallas kernel in a traced program.

    `grid` is (groups, steps) if there are several axes, else (steps,); `shapes` are the operands',
    then the results', on one device; `bytes` is their total size. `visited` is the number of
    visited tiles relative to a causal mask's, in layouts that skip tiles; else 1.
    """

    name: str
    grid: tuple[int, ...]
    runs: int
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    visited: float = 1.0

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
        name = equation.params["name"] or str(equation.params["name_and_src_info"].name)
        shapes = tuple(aval.shape for aval in avals)
        moved = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
        visited = float(dict(equation.params.get("metadata") or {}).get(VISITED, 1.0))
        key = name, grid, shapes, moved, visited
        known = found.get(key, Kernel(name, grid, 0, shapes, moved, visited))
        found[key] = known._replace(runs=known.runs + runs)
    return list(found.values())


def kernel_of(call: Instruction, traced: list[Kernel]) -> Kernel | None:
    """Returns the kernel that a custom call runs; None if it was not traced."""
    given = arrays(first_group(_OPERANDS, call.attributes))
    shapes = tuple(array.dimensions for array in (*given, *call.arrays))
    return next((each for each in traced if each.name in call.name and each.shapes == shapes), None)


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


class Schedules:
    """Schedules of compiled programs in a temporary folder; create it before libtpu is loaded."""

    def __init__(self) -> None:
        self._by_body: dict[str, Schedule] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="schedules_", ignore_cleanup_errors=True)
        # libtpu reads its flags only once, when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={self._folder.name} "
            "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        ).strip()

    def remove(self) -> None:
        """Removes the folder; this happens by itself when a process ends normally."""
        self._folder.cleanup()

    def read(self, module: Module) -> dict[str, Schedule]:
        """Returns the schedules of the last compiled program, by the custom call's name.

        libtpu writes one schedule for equal kernels, such as the same kernel in all layers. A
        kernel without a schedule gets the last equal kernel's, even from an earlier program.
        """
        calls = {
            call.name: first_group(_BODY_TEXT, call.attributes)
            for instructions in module.computations.values()
            for call in instructions
            if call.target == PALLAS
        }
        own = {name: schedule for name in calls if (schedule := self._of(name))}
        self._by_body |= {calls[name]: schedule for name, schedule in own.items() if calls[name]}
        shared = {name: self._by_body.get(body) for name, body in calls.items()}
        return {name: schedule for name, schedule in (shared | own).items() if schedule}

    def _of(self, name: str) -> Schedule | None:
        pattern = f"*-{glob.escape(name)}-*[0-9]-final_bundles.txt"
        found = glob.glob(os.path.join(self._folder.name, pattern))
        if not found:
            return None
        with open(max(found)) as file:
            return parse_schedule(file.read())

    def clear(self) -> None:
        """Removes the files of programs compiled so far, as their names may be reused."""
        for path in glob.glob(os.path.join(glob.escape(self._folder.name), "*")):
            os.remove(path)
