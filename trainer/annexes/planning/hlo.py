"""Parses the text of an optimised XLA program: computations, instructions, loops, bytes of shapes.

The text comes from `jax.stages.Compiled.as_text()`, in execution order. Alternatives do not work:
XLA's `cost_analysis` counts a loop's body once and gives no order, and jaxlib has no Python classes
for the program's protobuf (TensorFlow does, but the trainer does not use it).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import numpy as np

# Bits per element, by XLA's name for its type. Other types ("token", "opaque") take no memory.
_BITS = MappingProxyType(
    {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
    | {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
CYCLES = '"estimated_cycles":'
_CYCLES = re.compile(rf'{CYCLES}"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TILE = re.compile(r"T\(([0-9,]+)\)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# A memory space other than HBM: 1 is the vector memory of a TPU, others hold scalars and flags.
_OTHER_SPACE = re.compile(r"S\([1-9]\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in a shape; `dtype` is XLA's name, `dimensions` has the outermost axis first.

    `size` is in bytes, padded to whole tiles; arrays not `in_hbm` are in the chip's own memory.
    """

    dtype: str
    dimensions: tuple[int, ...]
    size: int
    in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction; `attributes` is the text after the operands, `shape` the result's."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, in a tuple's order."""
        return arrays(self.shape)

    @property
    def cycles(self) -> int:
        """The compiler's estimate in cycles; 0 if absent."""
        return int(first_group(_CYCLES, self.attributes) or 0)

    @property
    def op_name(self) -> str:
        """The path of the operation in the traced function; "" if unknown."""
        return first_group(_OP_NAME, self.attributes)

    @property
    def target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        return first_group(_TARGET, self.attributes)

    def computation(self, role: str) -> str:
        """Returns the computation called as `role` ("calls", "body", "condition"), or ""."""
        return first_group(rf"\b{role}=%?([\w.\-]+)", self.attributes)


def first_group(pattern: str | re.Pattern[str], text: str) -> str:
    """Returns the first group of a pattern's first match; "" if nothing matches."""
    found = re.search(pattern, text)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Module:
    """A program's computations in execution order; `donated` results reuse arguments' memory."""

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    donated: frozenset[int]

    def trip_count(self, loop: Instruction) -> int:
        """Returns how often a `while` runs its body; 1 if the number is not a constant.

        The TPU's compiler does not record the number; the condition compares a counter that starts
        at 0 with a constant.
        """
        known = first_group(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known)
        condition = self.computations.get(loop.computation("condition"), ())
        constants = [
            int(each.attributes.partition(")")[0])
            for each in condition
            if each.opcode == "constant" and re.fullmatch(r"[su]\d+\[\].*", each.shape)
        ]
        return max(constants, default=1)

    def called(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        """Yields (computation, runs) for loops, conditionals and calls, not for fusions."""
        names = {"while": "body", "call": "to_apply", "conditional": "true_computation"}
        callee = instruction.computation(names.get(instruction.opcode, "none"))
        if instruction.opcode == "conditional":
            # Only one branch runs: the first stands for all.
            branches = r"branch_computations=\{%?([\w.\-]+)"
            callee = first_group(branches, instruction.attributes) or callee
        if callee:
            yield callee, self.trip_count(instruction) if instruction.opcode == "while" else 1

    def named(self, name: str) -> Instruction | None:
        """Returns the instruction of this name; None if there is none."""
        every = itertools.chain.from_iterable(self.computations.values())
        return next((each for each in every if each.name == name), None)

    def root(self, name: str) -> Instruction | None:
        """Returns the result of a computation; None if there is no such computation."""
        return next((each for each in self.computations.get(name, ()) if each.root), None)

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions inside a fusion or an asynchronous start."""
        for inner in self.computations.get(instruction.computation("calls"), ()):
            yield inner
            yield from self.inside(inner)


def parse(text: str) -> Module:
    """Parses HLO text; raises ValueError if it has no entry computation."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry, name = "", ""
    current: list[Instruction] = []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name, current = header[2], []
            entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(current)
        elif name:
            instruction = _instruction(line)
            if instruction:
                current.append(instruction)
    if not entry:
        raise ValueError("the text of the program has no entry computation")
    first = text.partition("\n")[0]
    donated = re.findall(r"\{(\d+)\}: \(\d+, \{[^}]*\}, (?:may|must)-alias\)", first)
    return Module(computations, entry, frozenset(map(int, donated)))


def arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays in the text of a shape."""
    return tuple(
        _array(dtype, dimensions, layout or "")
        for dtype, dimensions, layout in _ARRAY.findall(shape)
    )


def _array(dtype: str, dimensions: str, layout: str) -> Array:
    sizes = tuple(int(word.strip("<=")) for word in dimensions.split(",") if word)
    order, _, tiles = layout.partition(":")
    padded = list(sizes)
    tile = first_group(_TILE, tiles)
    if tile and order:
        # The tile covers the minor-most dimensions; the layout lists dimensions minor first.
        for index, size in zip(_numbers(order), reversed(_numbers(tile)), strict=False):
            padded[index] = -(-padded[index] // size) * size
    size = -(-math.prod(padded) * _BITS.get(dtype, 0) // 8)
    return Array(dtype, sizes, size, not _OTHER_SPACE.search(tiles))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = line[found.end() :]
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, shape_end + 1)
    if not opcode:
        return None
    begin, end = opcode.end(), _closing(rest, opcode.end() - 1)
    if opcode[1] in ("constant", "parameter"):
        # These have a value or a number in place of operands.
        operands, attributes = (), rest[begin:]
    else:
        operands, attributes = tuple(_NAME.findall(rest[begin:end])), rest[end + 1 :]
    return Instruction(found[2], opcode[1], rest[:shape_end], operands, attributes, bool(found[1]))


def _closing(text: str, start: int) -> int:
    """Returns the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if not depth:
                return index
    return len(text)


def replica_groups(text: str) -> list[list[int]]:
    """Returns a collective's groups of devices from its attributes; [] if there are none.

    Accepts lists, `{{0,1},{2,3}}`; iotas, `[2,8]<=[4,4]T(1,0)`; and mesh axes,
    `mesh['a'=8,'b'=2] {'b'}`.
    """
    listed = re.search(r"replica_groups=\{(\{[0-9,{} ]*\})\}", text)
    if listed:
        return [_numbers(each) for each in re.findall(r"\{([0-9,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", text)
    if iota:
        sizes = _numbers(iota[3])
        order = _numbers(iota[4]) if iota[4] else list(range(len(sizes)))
        return _transposed(sizes, order, int(iota[2]))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text)
    if mesh:
        sizes_by_name = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        chosen = re.findall(r"'([^']+)'", mesh[2])
        if not set(chosen) <= sizes_by_name.keys():
            return []
        names, sizes = list(sizes_by_name), list(sizes_by_name.values())
        inner = [names.index(name) for name in chosen]
        outer = [index for index in range(len(sizes)) if index not in inner]
        return _transposed(sizes, outer + inner, math.prod(sizes[index] for index in inner))
    return []


def _transposed(sizes: list[int], order: list[int], length: int) -> list[list[int]]:
    """Returns the device numbers of a grid, transposed by `order`, in groups of `length`."""
    numbers = np.arange(math.prod(sizes)).reshape(sizes).transpose(order)
    return numbers.reshape(-1, length).tolist()
