"""The time of a compiled step by part, by one yardstick for all operations.

An operation takes the longest of three times: the bundles of its schedule, its bytes at the full
bandwidth of the HBM, and its products at the peak of the MXU. Copies that the program starts ahead
use the bandwidth that the operations between start and end leave, and collectives the links while
these run; HBM, links and network each serve one transfer after another. What is not done at a
transfer's end is waited for. XLA's own estimate of each operation stands beside it.

No stall of the vector unit is counted, nor the start of an operation or of a transfer, so these
times are lower bounds.

A GPU has no schedules: a kernel takes the longer of its bytes and its products, and a launch. Bytes
that stay in the L2 cache count like all others.
"""

import collections
import dataclasses
import itertools

from trainer.annexes.planning import time_by_part
from trainer.annexes.planning.collectives import NETWORK, Found, collectives_of
from trainer.annexes.planning.devices import (
    PEAK,
    Chip,
    Place,
    Rates,
    sent_bytes,
    slice_shape,
)
from trainer.annexes.planning.gpus import Gpu
from trainer.annexes.planning.hlo import Instruction, Module
from trainer.annexes.planning.kernels import Kernel, kernel_of
from trainer.annexes.planning.schedules import PALLAS, TRITON, Scheduled
from trainer.annexes.planning.work import Work, Worker, copied
from trainer.engine.hardware import peak_flops

_COPIED = ("copy-done", "slice-done")


@dataclasses.dataclass
class Collective:
    """A collective in one computation.

    `times` counts runs per step. Per run, `sent` is the bytes that a device sends, `seconds` the
    time at the links' bandwidth, and `exposed` the seconds for which nothing else ran.
    """

    kind: str
    sent: int
    seconds: float
    times: int
    exposed: float = 0.0


@dataclasses.dataclass(frozen=True)
class PricedKernel:
    """A Pallas kernel that a step runs.

    `shapes` are the operands', then the results', on one device; `shapes` and `grid` may be ().
    `cycles` (None without a schedule) and `size` (bytes) are per run; `times` counts runs per step.
    """

    name: str
    grid: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    cycles: int | None
    size: int
    times: int


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a step.

    `seconds` and, by XLA's own estimates of its fusions, `estimated` are by part of
    `time_by_part`; `estimated` is empty if the program has no estimates. `unread` counts products
    and kernels without a schedule, which are booked by their bytes and operations alone.
    `scheduled` is False on a GPU, which has no schedules.
    """

    seconds: dict[str, float]
    estimated: dict[str, float]
    collectives: list[Collective]
    kernels: list[PricedKernel]
    unread: int
    scheduled: bool = True

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def estimated_step(self) -> float:
        """Seconds of a step by XLA's own estimates."""
        return sum(self.estimated.values())

    def traffic(self) -> dict[str, dict[str, float]]:
        """Returns the bytes, seconds and exposed seconds per step, by kind of collective."""
        kinds: dict[str, dict[str, float]] = {}
        for collective in sorted(self.collectives, key=lambda each: each.kind):
            total = kinds.setdefault(collective.kind, {"bytes": 0, "seconds": 0.0, "exposed": 0.0})
            total["bytes"] += collective.sent * collective.times
            total["seconds"] += collective.seconds * collective.times
            total["exposed"] += collective.exposed * collective.times
        return kinds


@dataclasses.dataclass(frozen=True)
class Optimized:
    """A compiled program, and what its time depends on besides the chip.

    `module` is optimised; `traced` are the traced program's Pallas kernels. `places` are in mesh
    order. A device's `cores` share the groups of a kernel's grid.
    """

    module: Module
    places: list[Place]
    traced: list[Kernel]
    scheduled: Scheduled
    cores: int = 1

    def timing(self, chip: Chip | Gpu, rates: Rates = PEAK) -> Timing:
        """Returns the time of one step on a chip that reaches these rates."""
        return timing(
            self.module, chip, self.places, self.traced, self.scheduled, self.cores, rates
        )


def timing(
    module: Module,
    chip: Chip | Gpu,
    places: list[Place],
    traced: list[Kernel],
    scheduled: Scheduled,
    cores: int = 1,
    rates: Rates = PEAK,
) -> Timing:
    """Returns the time of one step of a program; see `Optimized`."""
    walk = _Walk(module, chip, places, traced, scheduled, cores, rates)
    walk.run(module.entry, 1)
    found = list(walk.kernels.values())
    schedules = not isinstance(chip, Gpu)
    every = itertools.chain.from_iterable(module.computations.values())
    estimated = walk.estimated if any(each.cycles for each in every) else {}
    return Timing(walk.seconds, estimated, walk.collectives, found, walk.unread, schedules)


@dataclasses.dataclass
class _Transfer:
    """A copy or collective under way: the seconds left, and those for which nothing else ran."""

    left: float
    exposed: float = 0.0


class _Queue:
    """A resource, such as a chip's links, that serves one transfer after another."""

    def __init__(self) -> None:
        self._waiting: collections.deque[_Transfer] = collections.deque()

    def start(self, seconds: float) -> _Transfer:
        """Puts a transfer at the end of the queue."""
        transfer = _Transfer(seconds)
        self._waiting.append(transfer)
        return transfer

    def advance(self, seconds: float, exposed: bool = False) -> None:
        """Serves the queue for some seconds; they are `exposed` if nothing else runs."""
        while self._waiting and seconds > 0:
            first = self._waiting[0]
            spent = min(seconds, first.left)
            first.left -= spent
            first.exposed += spent * exposed
            seconds -= spent
            if first.left <= 0:
                self._waiting.popleft()

    def wait(self, transfer: _Transfer | None = None) -> float:
        """Returns the seconds until a transfer, or without one everything, is done."""
        seconds = 0.0
        for each in self._waiting:
            seconds += each.left
            if each is transfer:
                return seconds
        return 0.0 if transfer else seconds


class _Machine:
    """A chip's clock and the transfers under way in one computation."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.memory, self.links, self.network = self.queues = _Queue(), _Queue(), _Queue()

    def spend(self, seconds: float, memory: float = 0.0) -> None:
        """Lets time pass; for `memory` seconds of it, the program's own work uses the HBM."""
        self.clock += seconds
        self.memory.advance(seconds - memory)
        self.links.advance(seconds)
        self.network.advance(seconds)

    def wait(self, queue: _Queue, transfer: _Transfer | None = None) -> float:
        """Waits for a transfer in a queue, or for all of them; returns the seconds."""
        seconds = queue.wait(transfer)
        self.clock += seconds
        for each in self.queues:
            each.advance(seconds, exposed=each is queue)
        return seconds


class _Walk:
    """Runs a program's instructions in order, and books their time."""

    def __init__(
        self,
        module: Module,
        chip: Chip | Gpu,
        places: list[Place],
        traced: list[Kernel],
        scheduled: Scheduled,
        cores: int,
        rates: Rates,
    ):
        self._module, self._chip, self._places = module, chip, places
        self._rates, self._memory = rates, chip.memory_bandwidth * rates.memory
        self._traced, self._scheduled, self._cores = traced, scheduled, cores
        self._worker = Worker(module)
        self._shape = slice_shape(places)
        self._slices = len({place.slice for place in places})
        self._peak = (peak_flops(chip.kind) or 0.0) * rates.products
        self.seconds: dict[str, float] = dict.fromkeys(time_by_part.PARTS, 0.0)
        self.estimated: dict[str, float] = dict.fromkeys(time_by_part.PARTS, 0.0)
        self.collectives: list[Collective] = []
        self.kernels: dict[tuple, PricedKernel] = {}
        self.unread = 0

    def run(self, name: str, times: int) -> float:
        """Runs a computation and books its time `times` times; returns the seconds of one run."""
        machine = _Machine()
        instructions = self._module.computations.get(name, ())
        pieces = [list(collectives_of(self._module, instruction)) for instruction in instructions]
        last = {piece.key: index for index, found in enumerate(pieces) for piece in found}
        under_way: dict[str, tuple[Collective, _Queue, _Transfer]] = {}
        copies: dict[str, _Transfer] = {}
        for index, each in enumerate(instructions):
            earlier = {*under_way}
            for piece in pieces[index]:
                if piece.key not in under_way:
                    under_way[piece.key] = self._started(piece, machine, times)
            if size := copied(each):
                copies[each.name] = machine.memory.start(size / self._memory)
            elif each.opcode in _COPIED and each.operands[0] in copies:
                waited = machine.wait(machine.memory, copies[each.operands[0]])
                self.seconds[time_by_part.COPIES] += waited * times
            if all(piece.overlapped for piece in pieces[index]):
                self._operate(name, each, machine, times)
            for piece in pieces[index]:
                if last[piece.key] == index and (piece.key in earlier or not piece.overlapped):
                    self._ended(under_way.pop(piece.key), machine, times)
            for inner, runs in self._module.called(each):
                machine.spend(self.run(inner, times * runs) * runs)
        for left in under_way.values():
            self._ended(left, machine, times)
        self.seconds[time_by_part.COPIES] += machine.wait(machine.memory) * times
        return machine.clock

    def _started(
        self, piece: Found, machine: _Machine, times: int
    ) -> tuple[Collective, _Queue, _Transfer]:
        kind, size, chip = piece.kind, piece.size, self._chip
        if kind.startswith(NETWORK):
            sent = sent_bytes(kind.removeprefix(NETWORK), size, self._slices)
            seconds, queue = sent / chip.network, machine.network
        else:
            places = self._places
            group = [places[number] for number in piece.group if number < len(places)] or places
            sent = sent_bytes(kind, size, len(group))
            seconds = chip.seconds_of_collective(sent, group, self._shape)
            if piece.pairs and isinstance(chip, Chip):
                pairs = [(places[sender], places[receiver]) for sender, receiver in piece.pairs]
                seconds = chip.seconds_of_permutation(sent, pairs, self._shape)
            queue = machine.links
        seconds /= self._rates.links
        collective = Collective(kind, sent, seconds, times)
        self.collectives.append(collective)
        return collective, queue, queue.start(seconds)

    def _ended(
        self, under_way: tuple[Collective, _Queue, _Transfer], machine: _Machine, times: int
    ) -> None:
        collective, queue, transfer = under_way
        waited = machine.wait(queue, transfer) * times
        self.seconds[time_by_part.COLLECTIVES] += waited
        self.estimated[time_by_part.COLLECTIVES] += waited
        collective.exposed = transfer.exposed

    def _operate(self, name: str, each: Instruction, machine: _Machine, times: int) -> None:
        """Books the own work of an instruction."""
        part, chip = time_by_part.part_of(each.op_name), self._chip
        work = self._worker.work(name, each)
        moving = work.bytes / self._memory
        if isinstance(chip, Gpu):
            self._launch(part, each, work, moving, machine, times)
            return
        clock = chip.clock * self._rates.products
        if each.target == PALLAS:
            cycles = self._run_kernel(each, work, times)
            estimate = max(cycles / clock, moving)
        else:
            cycles, estimate = self._scheduled.cycles.get(each.name, 0), each.cycles / clock
        if not cycles and (work.flops or each.target == PALLAS):
            self.unread += 1
        multiplying = work.flops / self._peak if self._peak else 0.0
        seconds = max(cycles / clock, moving, multiplying)
        self.seconds[part] += seconds * times
        self.estimated[part] += estimate * times
        machine.spend(seconds, moving)

    def _launch(
        self,
        part: str,
        each: Instruction,
        work: Work,
        moving: float,
        machine: _Machine,
        times: int,
    ) -> None:
        """Books a GPU's kernel and its launch; an instruction without work has no kernel."""
        assert isinstance(self._chip, Gpu)
        if not work.bytes:
            return
        flops: float = work.flops
        if each.target == TRITON:
            self._run_kernel(each, work, times)
            if kernel := kernel_of(each, self._traced):
                multiplied = kernel.flops / self._rates.kernels * self._rates.products
                flops, moving = multiplied, kernel.bytes / self._memory
        seconds = max(moving, flops / self._peak if self._peak else 0.0)
        self.seconds[part] += seconds * times
        self.seconds[time_by_part.LAUNCHES] += self._chip.launch * times
        machine.spend(seconds + self._chip.launch, moving)

    def _run_kernel(self, call: Instruction, work: Work, times: int) -> int:
        """Adds a run of a kernel to those of the step; returns its cycles, 0 if unknown."""
        kernel = kernel_of(call, self._traced)
        schedule = self._scheduled.kernels.get(call.name)
        if kernel is None:
            # Its grid is only in the schedule.
            steps = (schedule.steps,) if schedule else ()
            kernel = Kernel(call.name, steps, times, (), work.bytes)
        cycles = kernel.cycles(schedule, self._cores) if schedule else None
        key = kernel.name, kernel.shapes, cycles
        priced = PricedKernel(kernel.name, kernel.grid, kernel.shapes, cycles, kernel.bytes, 0)
        known = self.kernels.get(key, priced)
        self.kernels[key] = dataclasses.replace(known, times=known.times + times)
        return cycles or 0
