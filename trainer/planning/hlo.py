"""Parses the text of an optimised XLA program: computations, instructions, loops, bytes of shapes.

The text comes from `jax.stages.Compiled.as_text()`, in execution order. Alternatives do not work:
XLA's `cost_analysis` counts a loop's body once and knows no order, and jaxlib has no Python classes
for the program's protobuf (TensorFlow does, but the trainer does not use it).
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

# Bits of an element by XLA's name of its type. Others ("token", "opaque") take no memory.
_BITS = MappingProxyType(
    {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128}
    | {f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)}
)
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"([a-z][a-z0-9\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TILE = re.compile(r"T\(([0-9,]+)\)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# A memory space other than HBM: 1 is the vector memory of a TPU, others hold scalars and flags.
_OTHER_SPACE = re.compile(r"S\([1-9]\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in a shape.

    Attributes:
      dtype: XLA's name of the element type.
      dimensions: sizes, outermost logical axis first.
      size: bytes, padded to whole tiles.
      in_hbm: False in the chip's own vector or scalar memory.
    """

    dtype: str
    dimensions: tuple[int, ...]
    size: int
    in_hbm: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction; `attributes` is the text after the operands, `shape` the result's.

    `name` is unique in the program. `root` marks the result of a computation.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    root: bool

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result; a tuple's in order."""
        return arrays(self.shape)

    @property
    def cycles(self) -> int:
        """The compiler's estimate in cycles; 0 if absent."""
        found = _CYCLES.search(self.attributes)
        return int(found[1]) if found else 0

    @property
    def op_name(self) -> str:
        """The path of the operation in the traced function; "" if unknown."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """The target of a custom call, else ""."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""

    def computation(self, role: str) -> str | None:
        """Returns the computation called as `role`: "calls", "body", "condition"."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: computations by name, each in execution order.

    `donated` are indices of results written into the memory of arguments.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    donated: frozenset[int]

    def trip_count(self, loop: Instruction) -> int:
        """Returns how often a `while` runs its body; 1 if the number is not a constant.

        The TPU's compiler does not write the number; the condition compares a counter that starts
        at 0 with a constant.
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        condition = self.computations.get(loop.computation("condition") or "", ())
        constants = [
            int(each.attributes.partition(")")[0])
            for each in condition
            if each.opcode == "constant" and re.fullmatch(r"[su]\d+\[\].*", each.shape)
        ]
        return max(constants, default=1)

    def called(self, instruction: Instruction) -> Iterator[tuple[str, int]]:
        """Yields (computation, number of runs) for loops, conditionals and calls.

        Fusions yield nothing: a fusion counts as one piece of work.
        """
        if instruction.opcode == "while":
            body = instruction.computation("body")
            if body:
                yield body, self.trip_count(instruction)
        elif instruction.opcode == "conditional":
            # Only one branch runs: the first stands for all.
            branches = re.search(r"branch_computations=\{%?([\w.\-]+)", instruction.attributes)
            branch = branches[1] if branches else instruction.computation("true_computation")
            if branch:
                yield branch, 1
        elif instruction.opcode == "call":
            callee = instruction.computation("to_apply")
            if callee:
                yield callee, 1

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions inside a fusion or an asynchronous start."""
        name = instruction.computation("calls")
        for each in self.computations.get(name or "", ()):
            yield each
            yield from self.inside(each)


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
    return Module(MappingProxyType(computations), entry, frozenset(map(int, donated)))


def arrays(shape: str) -> tuple[Array, ...]:
    """Returns the arrays in the text of a shape."""
    return tuple(
        _array(dtype, dimensions, layout or "")
        for dtype, dimensions, layout in _ARRAY.findall(shape)
    )


def _array(dtype: str, dimensions: str, layout: str) -> Array:
    sizes = tuple(int(each.strip("<=")) for each in dimensions.split(",") if each)
    order, _, tiles = layout.partition(":")
    padded = list(sizes)
    tile = _TILE.search(tiles)
    if tile and order:
        # The tile covers the minor-most dimensions; the layout lists dimensions minor first.
        minor = [int(each) for each in order.split(",")]
        for index, size in zip(minor, reversed(_numbers(tile[1])), strict=False):
            padded[index] = -(-padded[index] // size) * size
    bits = _BITS.get(dtype, 0)
    size = -(-math.prod(padded) * bits // 8)
    return Array(dtype, sizes, size, not _OTHER_SPACE.search(tiles))


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _instruction(line: str) -> Instruction | None:
    found = _INSTRUCTION.match(line)
    if not found:
        return None
    rest = line[found.end() :]
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = _OPCODE.match(rest, shape_end + 1)
    if not opcode:
        return None
    end = _closing(rest, opcode.end() - 1)
    inner = rest[opcode.end() : end]
    operands = () if opcode[1] in ("constant", "parameter") else tuple(_NAME.findall(inner))
    # Constants have their value, parameters their number, in place of operands.
    kept = opcode.end() if opcode[1] in ("constant", "parameter") else end + 1
    return Instruction(found[2], opcode[1], rest[:shape_end], operands, rest[kept:], bool(found[1]))


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
        numbers = _transposed(sizes, order)
        length = int(iota[2])
        return [numbers[start : start + length] for start in range(0, len(numbers), length)]
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", text)
    if mesh:
        axes = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])]
        chosen = re.findall(r"'([^']+)'", mesh[2])
        names = [name for name, _ in axes]
        if not set(chosen) <= set(names):
            return []
        inner = [names.index(name) for name in chosen]
        outer = [index for index in range(len(axes)) if index not in inner]
        sizes = [size for _, size in axes]
        numbers = _transposed(sizes, outer + inner)
        length = math.prod(sizes[index] for index in inner)
        return [numbers[start : start + length] for start in range(0, len(numbers), length)]
    return []


def _transposed(sizes: list[int], order: list[int]) -> list[int]:
    """Returns range(prod(sizes)), reshaped to `sizes`, transposed by `order` and flattened."""
    strides = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]
    return [
        sum(place * strides[axis] for place, axis in zip(places, order, strict=True))
        for places in itertools.product(*(range(sizes[axis]) for axis in order))
    ]
