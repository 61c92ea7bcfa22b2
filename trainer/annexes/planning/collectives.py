"""Collectives of an optimised program: their kinds, bytes and groups of devices."""

import dataclasses
import re
from collections.abc import Iterator

from trainer.annexes.planning.hlo import Instruction, Module, replica_groups

# Prefix of `kind` for collectives between slices.
NETWORK = "between slices: "
COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)
# Targets in the first and the last of an asynchronous collective's fusions.
ENDS = ("AsyncCollectiveStart", "AsyncCollectiveDone")
# A collective of the SparseCore, beside the program: it begins where its operands are given.
_OFFLOADED = _START, _UPDATE, _DONE = (
    *("custom-call-start", "custom-call-update", "custom-call-done"),
)
_COMPUTATION = re.compile(r"called_computations=\{%?([\w.\-]+)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective of an instruction, or one piece of an asynchronous one.

    Pieces share a `key`, unique in the computation. `size` is the bytes of the whole array on one
    device, `group` the device numbers of one group; () means all devices. A permutation has
    `pairs` of senders and receivers.
    """

    key: str
    kind: str
    size: int
    group: tuple[int, ...]
    overlapped: bool
    pairs: tuple[tuple[int, int], ...] = ()


def collectives_of(module: Module, instruction: Instruction) -> Iterator[Found]:
    """Yields the collectives of an instruction or of its fusion; a `send` goes between slices."""
    called, inside = instruction.computation("calls"), tuple(module.inside(instruction))
    scattered = called.startswith("all-reduce-scatter")
    asynchronous = "async_collective" in called or any(each.target in ENDS for each in inside)
    transfer = _TRANSFER.search(instruction.attributes)
    if instruction.opcode == "send" and transfer:
        kind = NETWORK + transfer[1].lower().replace("_", "-")
        yield Found(instruction.name, kind, instruction.arrays[0].size, (), True)
    elif instruction.opcode == "send-done":
        yield Found(instruction.operands[0], NETWORK, 0, (), True)
    elif instruction.opcode in _OFFLOADED:
        yield from _offloaded(module, instruction)
    for each in (instruction, *inside):
        kind = re.sub(r"-(start|done)$", "", each.opcode)
        if kind not in COLLECTIVES:
            continue
        if each.opcode.endswith("-done") or instruction.opcode.endswith("-done"):
            # The end of an asynchronous collective names its start.
            yield Found(instruction.operands[0], kind, 0, (), True)
            continue
        started = each.opcode.endswith("-start") or instruction.opcode.endswith("-start")
        if scattered and kind == "all-reduce":
            kind = "reduce-scatter"
        # The pieces of an asynchronous collective in several fusions share a channel.
        channel = _CHANNEL.search(each.attributes) if asynchronous else None
        key = f"{kind} {channel[1]}" if channel else instruction.name
        yield _found(each, key, kind, started, started or asynchronous)


def _found(each: Instruction, key: str, kind: str, started: bool, overlapped: bool) -> Found:
    """Returns a collective, with the bytes of the whole array."""
    sizes = [array.size for array in each.arrays if array.size]
    # A start's shape lists the argument before the result.
    size = max(sizes, default=0) if started else sum(sizes)
    pairs = _pairs(each)
    groups = replica_groups(each.attributes)
    group = pairs[0] if pairs else tuple(groups[0]) if groups else ()
    if each.opcode == "reduce-scatter":  # its start lists the whole array
        size *= max(len(group), 1)
    return Found(key, kind, size, group, overlapped, pairs)


def _offloaded(module: Module, instruction: Instruction) -> Iterator[Found]:
    """Yields the collective that a SparseCore begins or ends at an instruction."""
    start: Instruction | None = instruction
    while start and start.opcode in (_UPDATE, _DONE):
        start = module.named(start.operands[0])
    named = _COMPUTATION.search(start.attributes) if start else None
    inner = module.computations.get(named[1], ()) if named else ()
    continued = instruction.opcode != _START
    ends, begins = instruction.opcode == _DONE, len(instruction.operands) > continued
    for each in inner:
        if each.opcode in COLLECTIVES and (ends or begins):
            key = instruction.operands[0] if ends else instruction.name
            yield _found(each, key, each.opcode, False, True)


def _pairs(instruction: Instruction) -> tuple[tuple[int, int], ...]:
    pairs = _PAIRS.search(instruction.attributes)
    found = _PAIR.findall(pairs[1]) if pairs else ()
    return tuple((int(sender), int(receiver)) for sender, receiver in found)
