"""The bytes that a compiled step holds on a device, by part.

The compiler gives totals: arguments, results and temporary memory, including tile padding. The
temporary memory is split by a walk through the instructions in order: at the moment of peak memory,
each live array is attributed to the operation that made it. The shares are scaled to the compiler's
total.
"""

import collections
import dataclasses
import itertools
import math
from typing import Any

import jax

from trainer.annexes.planning import time_by_part
from trainer.annexes.planning.hlo import Instruction, Module

PARAMETERS = "parameters"
OPTIMIZER_STATE = "optimizer state"
BATCH = "batch and metrics"
GRADIENTS = "gradients and update"
CODE = "program"
_ACTIVATIONS = "activations, "

_OF_LAYERS = (time_by_part.ATTENTION, time_by_part.FEED_FORWARD, time_by_part.EMBEDDING)

_UNKNOWN = _ACTIVATIONS + time_by_part.REST
_FREE = -1
# Operations that forward an array unchanged.
_PASSED_ON = ("bitcast", "copy", "copy-done", "copy-start", "get-tuple-element")
# Operations whose result shares its operand's memory.
_VIEWS = ("bitcast", "tuple", "get-tuple-element", "while", "optimization-barrier", "conditional")


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a compiled program on one device: bytes by part."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes that the program needs."""
        return sum(self.parts.values())


def memory(compiled: Any, module: Module, arguments: dict[str, Any], vocab_size: int) -> Memory:
    """Returns the memory of a compiled program.

    `compiled` is a `jax.stages.Compiled`, `arguments` maps part -> tree of sharded shapes, and
    `vocab_size` tells logits from other arrays.
    """
    stats = compiled.memory_analysis()
    held = {part: sum(map(_bytes, jax.tree.leaves(tree))) for part, tree in arguments.items()}
    shares = _scaled(held, stats.argument_size_in_bytes)
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    if results > 0:
        shares[BATCH] = shares.get(BATCH, 0) + results
    alive = Liveness(module, _divided(vocab_size)).peak(module.entry)
    for part, size in _scaled(alive, stats.temp_size_in_bytes).items():
        shares[part] = shares.get(part, 0) + size
    if stats.generated_code_size_in_bytes:
        shares[CODE] = stats.generated_code_size_in_bytes
    return Memory({part: size for part, size in shares.items() if size})


def _divided(size: int) -> set[int]:
    """Returns the possible sizes of a dimension on a device: `size` over powers of two."""
    found = [size]
    while found[-1] % 2 == 0 and found[-1] > 2048:
        found.append(found[-1] // 2)
    return {*found} - {1}


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _scaled(shares: dict[str, int], total: int) -> dict[str, int]:
    """Returns integers proportional to `shares` that add up to `total`."""
    whole = sum(shares.values())
    if not whole:
        return {time_by_part.REST: total} if total else {}
    scaled = {part: size * total // whole for part, size in shares.items()}
    largest = max(scaled, key=lambda part: scaled[part])
    scaled[largest] += total - sum(scaled.values())
    return scaled


class Liveness:
    """Follows a program's arrays in order; those with a dimension in `vocab_sizes` are logits."""

    def __init__(self, module: Module, vocab_sizes: set[int]):
        self._module, self._vocab_sizes = module, vocab_sizes
        self._peaks: dict[str, dict[str, int]] = {}

    def peak(self, name: str) -> dict[str, int]:
        """Returns a computation's bytes by part at peak memory, without arguments."""
        if name not in self._peaks:
            self._peaks[name] = _Run(self, self._module, name).peak()
        return self._peaks[name]

    def inner(self, instruction: Instruction) -> dict[str, int]:
        """Returns the peak inside the computations that an instruction runs."""
        peaks = [self.peak(name) for name, _ in self._module.called(instruction)]
        return max(peaks, key=lambda peak: sum(peak.values()), default={})

    def part(self, instruction: Instruction, dimensions: tuple[int, ...]) -> str:
        """Returns the part to which an instruction's result belongs."""
        if len(dimensions) > 1 and self._vocab_sizes & {*dimensions}:
            return time_by_part.LOGITS
        part = time_by_part.part_of(instruction.op_name)
        if part in (time_by_part.OPTIMIZER, time_by_part.COLLECTIVES):
            return GRADIENTS
        return part if part == time_by_part.LOGITS else _ACTIVATIONS + part

    def stacked(self, loop: Instruction) -> dict[int, str]:
        """Returns the parts of the arrays written by a loop's body, by index in its result.

        The activations that a scan keeps per layer start as zeros, whose instruction has no part.
        """
        name = loop.computation("body")
        body = {each.name: each for each in self._module.computations.get(name, ())}
        root = self._module.root(name)
        found = {}
        for index, operand in enumerate(root.operands if root else ()):
            written = body.get(operand)
            while written is not None and written.opcode in _PASSED_ON and written.operands:
                written = body.get(written.operands[0])
            if written is None or written.opcode == "parameter":
                continue
            sources = (*(body[name] for name in written.operands if name in body), written)
            names = [each.op_name for each in (*sources, *self._module.inside(written))]
            known = [part for part in map(time_by_part.part_of, names) if part in _OF_LAYERS]
            if known:
                found[index] = _ACTIVATIONS + max(known, key=known.count)
        return found

    def donated(self, name: str) -> frozenset[int]:
        """Returns the indices of a computation's results that share its arguments' memory."""
        if name == self._module.entry:
            return self._module.donated
        root = self._module.root(name)
        return frozenset(range(len(root.arrays))) if root else frozenset()


class _Run:
    """One pass through a computation."""

    def __init__(self, program: Liveness, module: Module, name: str):
        self._program = program
        self._instructions = module.computations.get(name, ())
        self._by_name = {instruction.name: instruction for instruction in self._instructions}
        self._buffers: dict[str, list[int]] = {}
        self._sizes: list[int] = []
        self._parts: list[str] = []
        self._assign()
        root, donated = module.root(name), program.donated(name)
        for index, buffer in enumerate(self._buffers[root.name] if root else ()):
            if index in donated and buffer != _FREE:
                self._sizes[buffer] = 0

    def peak(self) -> dict[str, int]:
        """Returns bytes by part at the moment of peak memory."""
        last: dict[int, int] = {}
        for place, each in enumerate(self._instructions):
            for operand in (*each.operands, each.name):
                last |= dict.fromkeys(self._buffers.get(operand, ()), place)
        ends: dict[int, list[int]] = collections.defaultdict(list)
        for buffer, place in last.items():
            ends[place].append(buffer)

        alive: set[int] = set()
        total = best = 0
        fullest: dict[str, int] = {}
        for place, each in enumerate(self._instructions):
            for buffer in self._buffers.get(each.name, ()):
                if buffer != _FREE and buffer not in alive:
                    alive.add(buffer)
                    total += self._sizes[buffer]
            inner = self._program.inner(each)
            now = total + sum(inner.values())
            if now > best:
                best, fullest = now, self._by_part(alive, inner)
            for buffer in ends[place]:
                if buffer in alive:
                    alive.remove(buffer)
                    total -= self._sizes[buffer]
        return fullest

    def _assign(self) -> None:
        last_use = {
            operand: place
            for place, each in enumerate(self._instructions)
            for operand in each.operands
        }
        for place, each in enumerate(self._instructions):
            held = [self._buffers.get(operand, []) for operand in each.operands]
            joined = list(itertools.chain(*held))
            if each.opcode in ("parameter", "constant"):
                found = [_FREE] * len(each.arrays)
            elif each.opcode in _VIEWS:
                found = self._view(each, joined)
            elif each.opcode.endswith("-done"):
                found = self._done(each)
            elif each.opcode.endswith("-start"):
                found = self._start(each, joined)
            else:
                pairs = zip(each.operands, held, strict=True)
                dying = (buffers for operand, buffers in pairs if last_use[operand] == place)
                ended = {buffer for buffer in itertools.chain(*dying) if buffer != _FREE}
                found = self._new(each, ended)
            self._buffers[each.name] = found

    def _view(self, each: Instruction, joined: list[int]) -> list[int]:
        if each.opcode == "while":
            for index, part in self._program.stacked(each).items():
                buffer = joined[index] if index < len(joined) else _FREE
                if buffer != _FREE and self._parts[buffer] == _UNKNOWN:
                    self._parts[buffer] = part
        if each.opcode == "get-tuple-element":
            index = int(each.attributes.partition("index=")[2].partition(",")[0] or 0)
            return joined[index : index + 1]
        return joined[: max(len(each.arrays), 1)]

    def _start(self, each: Instruction, joined: list[int]) -> list[int]:
        """Returns the memory of an asynchronous start, whose result also holds its operands."""
        new = self._new(each, set())
        # A copy-start lists its result first; other starts list their operands first.
        first = 1 if each.opcode == "copy-start" else 0
        for index, buffer in enumerate(joined, first):
            if index < len(new):
                if new[index] != _FREE:
                    self._sizes[new[index]] = 0
                new[index] = buffer
        return new

    def _done(self, each: Instruction) -> list[int]:
        """Returns the memory at an asynchronous operation's end, which its start's result holds."""
        start = self._by_name.get(each.operands[0]) if each.operands else None
        if start is None:
            return [_FREE] * len(each.arrays)
        held = self._buffers[start.name]
        found = []
        for array in each.arrays:
            places = [index for index, one in enumerate(start.arrays) if one == array]
            last = places[0 if start.opcode == "copy-start" else -1] if places else None
            found.append(held[last] if last is not None and last < len(held) else _FREE)
        return found

    def _new(self, each: Instruction, ended: set[int]) -> list[int]:
        buffers = []
        for array in each.arrays:
            if not array.in_hbm or not array.size:
                buffers.append(_FREE)
                continue
            # A result reuses the memory of an operand of the same size that dies here.
            reused = next((old for old in ended if self._sizes[old] == array.size), None)
            if reused is not None:
                ended.remove(reused)
            self._sizes.append(0 if reused is not None else array.size)
            self._parts.append(self._program.part(each, array.dimensions))
            buffers.append(len(self._sizes) - 1 if reused is None else reused)
        return buffers

    def _by_part(self, alive: set[int], inner: dict[str, int]) -> dict[str, int]:
        total: collections.Counter[str] = collections.Counter(inner)
        for buffer in alive:
            total[self._parts[buffer]] += self._sizes[buffer]
        return {part: size for part, size in total.items() if size}
