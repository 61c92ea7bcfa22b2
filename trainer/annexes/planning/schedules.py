"""Cycles of fusions and Pallas kernels, from the schedules that the TPU's compiler writes.

libtpu can write each operation's schedule: bundles of instructions of about one cycle each. How
often a bundle runs follows from the loops' exit tests; a kernel's also from its grid. Schedules do
not include waiting for memory or links.
"""

import dataclasses
import glob
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tasks.terminal.command_line import UserError
from trainer.annexes.planning.hlo import CYCLES, Instruction, Module, first_group

# The target of a kernel's custom call, on a TPU and on a GPU.
PALLAS = "tpu_custom_call"
TRITON = "__gpu$xla.gpu.triton"
# A conditional part has more bundles than this. The pipeline's own conditional parts, which start
# copies, are shorter.
_CONDITIONAL = 100
_BODY_TEXT = re.compile(r'"body":"([^"]*)"')
_DUMPED = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_ADDRESS = re.compile(r"\s*(?:0x)?([0-9a-f]+)\s.*?:\s")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_JUMP = re.compile(r"sbr\.rel \((!?)(%\w+)\).*?= \$region(\d+)")
_EXIT = re.compile(
    r"(%\w+) = scmp\.ge\.s32\.totalorder (?:\(!?%\w+\), )?%\w+, (\d+) /\* loop exit test"
)
_COMPARED = re.compile(
    r"(%\w+) = scmp\.(eq|ne|ge|lt)\.s32\.totalorder (?:\(!?%\w+\), )?(%\w+), (\d+)\b"
)
_OUTSIDE = re.compile(r"(%\w+) = pnand (%\w+), (%\w+)")
_INDEX = re.compile(r"(%\w+) = [^;}]*iteration index")
# What the schedules of a large step take, and more.
_FREE_BYTES = 500_000_000
_CALLED = re.compile(r"\b(?:calls|to_apply)=%?[\w.\-]+")
_STAGE = re.compile(r"stage = (\d+)")


class Schedule(NamedTuple):
    """The bundles that a kernel runs.

    Attributes:
      step: bundles per grid step. Parts whose condition is data count in every step.
      once: bundles of parts that run at one index of the grid only: once a group.
      inner: bundles of `step` in loops of unknown length. Such a loop is assumed to run half as
        often as the loop around it: a causal mask leaves out half of the tiles.
      steps: grid steps of all groups, according to the schedule; 1 without a loop over the grid.
    """

    step: float
    once: float
    inner: float = 0.0
    steps: int = 1

    def cycles(self, groups: int, steps: int, visited: float = 1.0) -> float:
        """Returns the cycles; `visited` multiplies the assumed runs of loops of unknown length."""
        step = self.step + (visited - 1.0) * self.inner
        return groups * (steps * step + self.once)


@dataclasses.dataclass(frozen=True)
class Bundles:
    """The structure of a schedule; addresses count bundles.

    `loops` are (first, last address) -> runs, or None if the limit is not a constant. `skips` are
    (first, last address) -> whether they are skipped at all indices of the grid but one.
    `pipelined` are the addresses that mention a stage of the grid's pipeline, which has `stages`.
    `windows` are (first, last address) -> the iterations of the loop around them that run them: a
    fusion's pipeline loops once more for each stage before and after its work.
    """

    total: int
    loops: Mapping[tuple[int, int], int | None]
    skips: Mapping[tuple[int, int], bool]
    pipelined: frozenset[int]
    stages: int
    windows: Mapping[tuple[int, int], int]

    @classmethod
    def parse(cls, text: str) -> "Bundles":
        """Parses the text of a file of final bundles."""
        address, stages = -1, 0
        first: dict[str, int] = {}  # region -> its first address
        jumps: list[tuple[int, str, str, str]] = []  # (address, negation, condition, region)
        limits: dict[str, int] = {}  # condition that ends a loop -> the loop's limit
        indices: set[str] = set()  # registers with an index of the grid
        compared: dict[str, list[str]] = {}  # condition -> [comparison, register, number]
        outside: dict[str, list[str]] = {}  # condition -> two, one of which does not hold
        pipelined: set[int] = set()
        for line in text.splitlines():
            found = _ADDRESS.match(line)
            if found:
                address = int(found[1], 16)
            for region in _REGION.findall(line):
                first.setdefault(region, address)
            for stage in _STAGE.findall(line):
                pipelined.add(address)
                stages = max(stages, int(stage))
            jumps += [(address, *jump) for jump in _JUMP.findall(line)]
            limits |= {condition: int(limit) for condition, limit in _EXIT.findall(line)}
            indices.update(_INDEX.findall(line))
            compared |= {condition: rest for condition, *rest in _COMPARED.findall(line)}
            outside |= {condition: both for condition, *both in _OUTSIDE.findall(line)}
        loops: dict[tuple[int, int], int | None] = {}
        skips: dict[tuple[int, int], bool] = {}
        windows: dict[tuple[int, int], int] = {}
        for at, negation, condition, region in jumps:
            if region not in first:
                continue
            to = first[region]
            if to <= at:
                loops[to, at] = limits.get(condition)
                continue
            comparison, register, _ = compared.get(condition, [""] * 3)
            # The jump leaves the part out where its condition holds.
            but_one = comparison == ("eq" if negation else "ne")
            skips[at + 1, to - 1] = but_one and register in indices
            both = sorted(compared.get(each, [""] * 3) for each in outside.get(condition, ()))
            if not negation and [each[0] for each in both] == ["ge", "lt"]:
                (_, register, low), (_, other, high) = both
                if register == other and register in indices:
                    windows[at + 1, to - 1] = int(high) - int(low)
        in_order = dict(sorted(loops.items()))
        return cls(address + 1, in_order, skips, frozenset(pipelined), stages, windows)

    def fusion_cycles(self) -> int:
        """Returns the bundles that a fusion runs; loops of unknown length count once."""
        runs = [1] * self.total
        for (start, end), limit in self.loops.items():
            for at in range(start, end + 1):
                runs[at] *= limit or 1
        for (first, last), iterations in self.windows.items():
            around = [loop for loop in self.loops if loop[0] < first and last <= loop[1]]
            if around and (limit := self.loops[around[-1]]):
                for at in range(first, last + 1):
                    runs[at] = runs[at] // limit * iterations
        return sum(runs)

    def kernel_schedule(self) -> Schedule:
        """Returns how many bundles a kernel runs in each step of its grid."""
        # The grid is the outermost loop, if there is more than one step; its body counts once.
        runs, unknown = [1.0] * self.total, [False] * self.total
        trips: dict[tuple[int, int], float] = {}
        grid: tuple[int, int] | None = None
        steps = 1
        for (start, end), limit in self.loops.items():
            around = [trips[loop] for loop in trips if loop[0] <= start and end <= loop[1]]
            if not around and start in self.pipelined:
                trips[start, end] = 1.0
                if grid is None:
                    grid, steps = (start, end), max((limit or 1) - self.stages, 1)
                continue
            trips[start, end] = float(limit) if limit else ((around or [1.0])[-1] + 1) / 2
            for at in range(start, end + 1):
                unknown[at] = unknown[at] or not limit
                runs[at] *= trips[start, end]
        start, end = grid or (0, self.total - 1)
        once = 0.0
        for (begin, after), at_index in sorted(self.skips.items()):
            outside = [loop for loop in self.loops if loop[0] <= begin and after <= loop[1]]
            # Inside another loop, a skip only tests whether an inner loop runs at all.
            inside = all(loop[0] in self.pipelined for loop in outside)
            # Every grid step loops over tiles, however few bundles the loop has.
            part = at_index and after - begin > _CONDITIONAL and not any(unknown[begin : after + 1])
            if part and inside and start <= begin and after <= end:
                once += sum(runs[begin : after + 1])
                runs[begin : after + 1] = [0.0] * (after + 1 - begin)
        inner = sum(runs[at] for at in range(start, end + 1) if unknown[at])
        return Schedule(sum(runs[start : end + 1]), once, inner, steps)


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """The schedules of a program, by instruction name: kernels', and cycles of all others."""

    kernels: Mapping[str, Schedule] = dataclasses.field(default_factory=dict)
    cycles: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Schedules:
    """Schedules of compiled programs in a temporary folder; create it before libtpu is loaded."""

    def __init__(self) -> None:
        # What identifies an operation -> its schedule, for all programs compiled so far: libtpu
        # writes one schedule for equal operations, such as the same kernel in all layers.
        self._known: dict[object, Bundles] = {}
        # libtpu ends the process if it cannot write.
        place = tempfile.gettempdir()
        if shutil.disk_usage(place).free < _FREE_BYTES:
            raise UserError(
                f"{place} has less than {_FREE_BYTES / 1e6:,.0f} MB free for the compiler's "
                "schedules: set TMPDIR to another folder"
            )
        self._folder = tempfile.TemporaryDirectory(prefix="schedules_", ignore_cleanup_errors=True)
        # libtpu reads its flags only once, when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={self._folder.name} "
            "--xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        ).strip()

    def remove(self) -> None:
        """Removes the folder; this happens by itself when a process ends normally."""
        self._folder.cleanup()

    def read(self, module: Module) -> Scheduled:
        """Returns the schedules of the last compiled program.

        An operation without a schedule gets the last equal operation's, even from an earlier
        program.
        """
        files = self._files()
        named = dict(_identities(module))
        for name, identity in named.items():
            if name in files:
                with open(files[name]) as file:
                    self._known[identity] = Bundles.parse(file.read())
        found = {
            name: self._known[identity]
            for name, identity in named.items()
            if identity in self._known
        }
        kernels = {
            call.name
            for instructions in module.computations.values()
            for call in instructions
            if call.target == PALLAS
        }
        return Scheduled(
            {name: found[name].kernel_schedule() for name in found if name in kernels},
            {name: found[name].fusion_cycles() for name in found if name not in kernels},
        )

    def program(self) -> str | None:
        """Returns the text of the last compiled program as libtpu wrote it; None if it did not.

        XLA's estimates are left out, since only some operations have one.
        """
        pattern = os.path.join(glob.escape(self._folder.name), "*-TLP-hlo.txt")
        paths = sorted(glob.glob(pattern), key=os.path.getmtime)
        return pathlib.Path(paths[-1]).read_text().replace(CYCLES, "") if paths else None

    def _files(self) -> dict[str, str]:
        """Returns the newest file of each operation, by its name."""
        found = {}
        for path in sorted(glob.glob(os.path.join(glob.escape(self._folder.name), "*"))):
            name = _DUMPED.fullmatch(os.path.basename(path))
            if name and "schedule-analysis" not in path:
                found[name[1]] = path
        return found

    def clear(self) -> None:
        """Removes the files of programs compiled so far, as their names may be reused."""
        for path in glob.glob(os.path.join(glob.escape(self._folder.name), "*")):
            os.remove(path)


def _identities(module: Module) -> Iterator[tuple[str, object]]:
    """Yields each instruction's name, and a value that equal operations share."""
    inner: dict[str, object] = {}
    for instructions in module.computations.values():
        shapes = {each.name: each.shape for each in instructions}
        for instruction in instructions:
            is_kernel = instruction.target == PALLAS
            body = first_group(_BODY_TEXT, instruction.attributes) if is_kernel else ""
            operands = tuple(shapes.get(operand) for operand in instruction.operands)
            computed = _computed(module, instruction.computation("calls"), inner)
            rest = operands, computed or _semantics(instruction)
            yield instruction.name, body or (instruction.opcode, instruction.shape, *rest)


def _computed(module: Module, name: str, known: dict[str, object]) -> object:
    """Returns a computation without the names in it; None if there is no such computation."""
    if name not in known:
        instructions = module.computations.get(name, ())
        places = {each.name: str(place) for place, each in enumerate(instructions)}
        known[name] = tuple(
            (
                instruction.opcode,
                instruction.shape,
                tuple(places.get(operand) for operand in instruction.operands),
                _semantics(instruction),
                _computed(module, instruction.computation("calls"), known),
            )
            for instruction in instructions
        )
    return known[name] or None


def _semantics(instruction: Instruction) -> str:
    """Returns the attributes that change what an instruction does."""
    text, _, _ = instruction.attributes.partition("metadata=")
    text, _, _ = text.partition("backend_config=")
    return _CALLED.sub("", text)
