"""The time of a compiled TPU step by part, from the compiler's own estimates.

Fusions carry `estimated_cycles`, Pallas kernels have a schedule (`trainer.planning.kernels`), and a
collective's time is its bytes divided by the links' bandwidth. Asynchronous collectives count only
the time that no work between their start and end hides.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from trainer.planning import parts
from trainer.planning.devices import Chip, Place, seconds_of_collective, sent_bytes, slice_shape
from trainer.planning.hlo import Instruction, Module, replica_groups
from trainer.planning.kernels import PALLAS, Kernel, Schedule, kernel_of

# Prefix of `kind` for collectives between slices.
NETWORK = "between slices: "
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclasses.dataclass
class Collective:
    """A collective in one computation.

    `times` counts runs per step. Per run, `sent` is the bytes that a device sends, `seconds` the
    time at the links' bandwidth, and `hidden` the seconds that other work hides.
    """

    kind: str
    sent: int
    seconds: float
    times: int
    hidden: float = 0.0

    @property
    def exposed(self) -> float:
        """Seconds per run that no other work hides."""
        return max(self.seconds - self.hidden, 0.0)


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
    """The estimated time of a step by part; `unpriced` counts products without an estimate."""

    seconds: dict[str, float]
    collectives: list[Collective]
    kernels: list[PricedKernel]
    unpriced: int

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def traffic(self) -> dict[str, dict[str, float]]:
        """Returns the bytes, seconds and exposed seconds per step, by kind of collective."""
        kinds: dict[str, dict[str, float]] = {}
        for each in sorted(self.collectives, key=lambda each: each.kind):
            total = kinds.setdefault(each.kind, {"bytes": 0, "seconds": 0.0, "exposed": 0.0})
            total["bytes"] += each.sent * each.times
            total["seconds"] += each.seconds * each.times
            total["exposed"] += each.exposed * each.times
        return kinds


def timing(
    module: Module,
    chip: Chip,
    places: list[Place],
    traced: list[Kernel],
    schedules: Mapping[str, Schedule],
    cores: int = 1,
) -> Timing:
    """Returns the estimated time of one step of a program.

    `module` is optimised; `traced` are the traced program's Pallas kernels. `places` are in mesh
    order; `schedules` are keyed by the custom call's name. A device's `cores` share the groups of
    a kernel's grid.
    """
    seconds: dict[str, float] = dict.fromkeys(parts.PARTS, 0.0)
    collectives_found: list[Collective] = []
    kernels: dict[tuple, PricedKernel] = {}
    unpriced = 0
    shape = slice_shape(places)
    slices = len({place.slice for place in places})

    def price(first: Found, times: int) -> Collective:
        kind, size = first.kind, first.size
        if kind.startswith(NETWORK):
            sent = sent_bytes(kind.removeprefix(NETWORK), size, slices)
            return Collective(kind, sent, sent / chip.network, times)
        group = [places[number] for number in first.group if number < len(places)] or places
        sent = sent_bytes(kind, size, len(group))
        return Collective(kind, sent, seconds_of_collective(chip, sent, group, shape), times)

    def run_kernel(call: Instruction, times: int) -> int:
        kernel, schedule = kernel_of(call, traced), schedules.get(call.name)
        if kernel is None:
            kernel = Kernel(call.name, (), times, (), sum(array.size for array in call.arrays))
            schedule = None
        cycles = kernel.cycles(schedule, cores) if schedule else None
        key = kernel.name, kernel.shapes, cycles
        priced = PricedKernel(kernel.name, kernel.grid, kernel.shapes, cycles, kernel.bytes, 0)
        known = kernels.get(key, priced)
        kernels[key] = dataclasses.replace(known, times=known.times + times)
        # Schedules do not include waiting for memory.
        moving = round(kernel.bytes / chip.memory_bandwidth * chip.clock)
        return max(cycles, moving) if cycles else 0

    def walk(name: str, times: int) -> None:
        nonlocal unpriced
        clock = 0.0  # seconds from the start of this computation
        # Key -> the collective's parts, and the clock at its start and end.
        pieces: dict[str, tuple[list[Found], float, float]] = {}
        for each in module.computations.get(name, ()):
            cycles = each.cycles
            if each.target == PALLAS:
                cycles = run_kernel(each, times)
            elif not cycles and each.opcode in ("convolution", "dot"):
                unpriced += 1
            spent = cycles / chip.clock
            seconds[parts.part_of(each.op_name)] += spent * times
            for found in collectives_of(module, each):
                before, start, _ = pieces.get(found.key, ([], clock, clock))
                pieces[found.key] = ([*before, found], start, clock + spent)
            clock += spent
            for inner, runs in module.called(each):
                walk(inner, times * runs)
        for found_parts, start, end in pieces.values():
            collective = price(found_parts[0], times)
            if len(found_parts) > 1 or found_parts[0].overlapped:
                collective.hidden = min(end - start, collective.seconds)
            collectives_found.append(collective)
            seconds[parts.COLLECTIVES] += collective.exposed * times

    walk(module.entry, 1)
    return Timing(seconds, collectives_found, list(kernels.values()), unpriced)


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective of an instruction, or one piece of an asynchronous one.

    Pieces share a `key`, unique in the computation. `size` is the bytes of the whole array on one
    device, `group` the device numbers of one group; () means all devices.
    """

    key: str
    kind: str
    size: int
    group: tuple[int, ...]
    overlapped: bool


def collectives_of(module: Module, instruction: Instruction) -> Iterator[Found]:
    """Yields the collectives of an instruction or of its fusion; a `send` goes between slices."""
    called = instruction.computation("calls")
    scattered, asynchronous = called.startswith("all-reduce-scatter"), "async_collective" in called
    transfer = _TRANSFER.search(instruction.attributes)
    if instruction.opcode == "send" and transfer:
        kind = NETWORK + transfer[1].lower().replace("_", "-")
        yield Found(instruction.name, kind, instruction.arrays[0].size, (), True)
    elif instruction.opcode == "send-done":
        yield Found(instruction.operands[0], NETWORK, 0, (), True)
    for each in (instruction, *module.inside(instruction)):
        kind = re.sub(r"-(start|done)$", "", each.opcode)
        if kind not in _COLLECTIVES:
            continue
        if each.opcode.endswith("-done") or instruction.opcode.endswith("-done"):
            # The end of an asynchronous collective names its start.
            yield Found(instruction.operands[0], kind, 0, (), True)
            continue
        started = each.opcode.endswith("-start") or instruction.opcode.endswith("-start")
        sizes = [array.size for array in each.arrays if array.size]
        # A start's shape lists the argument before the result.
        size = max(sizes, default=0) if started else sum(sizes)
        group = tuple(_group(each))
        if kind == "reduce-scatter":
            size *= max(len(group), 1)
        if scattered and kind == "all-reduce":
            kind = "reduce-scatter"
        # The pieces of an asynchronous collective in several fusions share a channel.
        channel = _CHANNEL.search(each.attributes) if asynchronous else None
        key = f"{kind} {channel[1]}" if channel else instruction.name
        yield Found(key, kind, size, group, started or asynchronous)


def _group(instruction: Instruction) -> list[int]:
    pair = _PAIRS.search(instruction.attributes)
    if pair:
        return [int(pair[1]), int(pair[2])]
    groups = replica_groups(instruction.attributes)
    return groups[0] if groups else []
