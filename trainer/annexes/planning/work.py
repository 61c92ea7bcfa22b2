"""The HBM bytes and the products of an instruction of an optimised program."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from trainer.annexes.planning.collectives import COLLECTIVES, ENDS
from trainer.annexes.planning.hlo import Array, Instruction, Module, first_group

# Instructions that move and compute nothing themselves.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call"),
    *("conditional", "after-all", "optimization-barrier", "partition-id", "replica-id"),
    *("send", "recv"),
)
# Custom calls that only name memory.
_NAMES_MEMORY = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
_LABELS = re.compile(r"dim_labels=([a-z0-9?]+)_([a-z0-9?]+)->([a-z0-9?]+)")
_SUMMED = re.compile(r"lhs_contracting_dims=\{([0-9,]*)\}")
# Products that the GPU's compiler leaves to cuBLAS; their second result is scratch.
_CUBLAS = "__cublas"
_SUMMED_BY_CUBLAS = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
_SLICING = ("slice", "dynamic-slice", "gather")
_VIEWS = ("bitcast", "get-tuple-element")


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one run of an instruction: `bytes` read from and written to HBM, and `flops`.

    `flops` are the floating-point operations of its products, 2 for each multiplied element.
    """

    bytes: int = 0
    flops: int = 0


class _Computation:
    """A computation's instructions by name, and who uses their results."""

    def __init__(self, instructions: tuple[Instruction, ...]):
        self.named = {each.name: each for each in instructions}
        self.users: dict[str, list[Instruction]] = {}
        self.parameters: dict[int, Instruction] = {}
        for instruction in instructions:
            for operand in dict.fromkeys(instruction.operands):
                self.users.setdefault(operand, []).append(instruction)
            if instruction.opcode == "parameter":
                self.parameters[int(instruction.attributes.partition(")")[0])] = instruction


class Worker:
    """Counts the work of a module's instructions."""

    def __init__(self, module: Module):
        self._module = module
        self._computations = {
            name: _Computation(instructions) for name, instructions in module.computations.items()
        }

    def work(self, name: str, instruction: Instruction) -> Work:
        """Returns the work of an instruction of the computation `name`."""
        if instruction.opcode in _FREE or instruction.target in _NAMES_MEMORY:
            return Work()
        scope = self._computations[name].named
        operands = [scope[operand] for operand in instruction.operands if operand in scope]
        if instruction.opcode != "fusion":
            return Work(_moved(instruction, operands), _flops(instruction, scope))
        called = instruction.computation("calls")
        read = sum(
            min(self._read(called, index), _in_hbm(operand.arrays))
            for index, operand in enumerate(operands)
        )
        written = self._written(called, instruction.arrays)
        return Work(read + written, self._flops_inside(called))

    def _read(self, name: str, index: int) -> int:
        """Returns how many bytes a fused computation reads of a parameter, wherever it lies."""
        parameter = self._computations[name].parameters[index]
        return min(self._used(name, parameter), _size(parameter.arrays))

    def _used(self, name: str, value: Instruction) -> int:
        """Returns the bytes that the users of a value read, if each reads its own."""
        total = 0
        for user in self._computations[name].users.get(value.name, ()):
            places = [i for i, operand in enumerate(user.operands) if operand == value.name]
            if user.opcode in _SLICING and places == [0]:
                total += _size(user.arrays)
            elif user.opcode == "dynamic-update-slice" and places == [0]:
                continue  # updated in place
            elif _carried(user) or user.opcode == "tuple":
                continue
            elif user.opcode in _VIEWS:
                total += self._used(name, user)
            elif user.opcode == "fusion":
                inner = user.computation("calls")
                total += sum(self._read(inner, place) for place in places)
            else:
                return _size(value.arrays)
        return total

    def _written(self, name: str, results: tuple[Array, ...]) -> int:
        """Returns the bytes that a fused computation writes into HBM; updates lie in place."""
        root = self._module.root(name)
        if root is None:
            return _in_hbm(results)
        scope = self._computations[name].named
        made = [scope[operand] for operand in root.operands] if root.opcode == "tuple" else [root]
        if len(made) != len(results):
            return _in_hbm(results)
        return sum(
            min(_size(self._change(name, each)), array.size)
            for each, array in zip(made, results, strict=True)
            if array.in_hbm and not _carried(each) and each.opcode != "parameter"
        )

    def _change(self, name: str, made: Instruction) -> tuple[Array, ...]:
        """Returns the arrays that a result differs in from the operand whose memory it takes."""
        scope = self._computations[name].named
        while made.opcode in _VIEWS and made.operands and made.operands[0] in scope:
            made = scope[made.operands[0]]
        if made.opcode == "dynamic-update-slice" and made.operands[1] in scope:
            return scope[made.operands[1]].arrays
        if made.opcode == "fusion":
            inner = made.computation("calls")
            root = self._module.root(inner)
            if root is not None and root.opcode != "tuple":
                return self._change(inner, root)
        return made.arrays

    def _flops_inside(self, name: str) -> int:
        scope = self._computations[name].named
        return sum(
            self._flops_inside(each.computation("calls"))
            if each.opcode == "fusion"
            else _flops(each, scope)
            for each in scope.values()
        )


def _carried(instruction: Instruction) -> bool:
    """Returns True for a collective that a fusion only hands on while the links move its bytes."""
    return instruction.opcode in COLLECTIVES or instruction.target in ENDS


def copied(instruction: Instruction) -> int:
    """Returns the bytes that an asynchronous copy or slice moves through HBM; 0 for others."""
    if instruction.opcode not in ("copy-start", "slice-start"):
        return 0
    # copy-start lists the result first, slice-start the operand.
    first, second = instruction.arrays[:2]
    if instruction.opcode == "slice-start":
        return second.size * (first.in_hbm + second.in_hbm)
    return first.size * (first.in_hbm + second.in_hbm)


def _size(arrays: tuple[Array, ...]) -> int:
    return sum(array.size for array in arrays)


def _in_hbm(arrays: tuple[Array, ...]) -> int:
    # Scalars are few bytes, whatever their tiles.
    return sum(array.size for array in arrays if array.in_hbm and array.dimensions)


def _moved(instruction: Instruction, operands: list[Instruction]) -> int:
    results = instruction.arrays
    written = _in_hbm(results[:1] if instruction.target.startswith(_CUBLAS) else results)
    if instruction.opcode.endswith(("-start", "custom-call-update", "-done")):
        return 0
    if instruction.opcode in _SLICING:
        read = _size(instruction.arrays) if operands and _in_hbm(operands[0].arrays) else 0
        return read + written
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        return _in_hbm(operands[1].arrays) + (_size(operands[1].arrays) if written else 0)
    return written + sum(_in_hbm(operand.arrays) for operand in operands)


def _flops(instruction: Instruction, scope: Mapping[str, Instruction]) -> int:
    """Returns the operations of a `dot`, `convolution` or cuBLAS product; 0 for others."""
    cublas = instruction.target.startswith(_CUBLAS)
    if instruction.opcode not in ("dot", "convolution") and not cublas:
        return 0
    left, right = (scope[name].arrays[0].dimensions for name in instruction.operands[:2])
    result = instruction.arrays[0].dimensions
    if instruction.opcode == "dot" or cublas:
        axes = first_group(_SUMMED_BY_CUBLAS if cublas else _SUMMED, instruction.attributes)
        summed = math.prod(left[int(axis)] for axis in re.findall(r"\d+", axes))
        return 2 * math.prod(result) * summed
    labels = _LABELS.search(instruction.attributes)
    if not labels:
        return 0
    inputs, kernel, outputs = labels.groups()
    # Output positions x kernel elements, without those that meet only padding or holes.
    pairs = math.prod(
        window.pairs(left[inputs.index(axis)], result[outputs.index(axis)])
        for axis, window in _windows(instruction.attributes, kernel, right)
    )
    groups = int(first_group(r"batch_group_count=(\d+)", instruction.attributes) or 1)
    batch, summed = left[inputs.index("b")] // groups, right[kernel.index("i")]
    return 2 * pairs * batch * summed * result[outputs.index("f")]


@dataclasses.dataclass(frozen=True)
class _Window:
    """A convolution's window along one axis, as XLA writes it."""

    size: int
    stride: int
    low: int
    left_dilation: int
    right_dilation: int

    def pairs(self, length: int, outputs: int) -> int:
        """Returns how many (output, window) positions meet an element of the input."""
        if self.size == 1 and outputs == length:
            return outputs
        dilated = (length - 1) * self.left_dilation + 1
        found = 0
        for offset in range(self.size):
            begin = offset * self.right_dilation - self.low
            met = range(begin, begin + outputs * self.stride, self.stride)
            found += sum(0 <= at < dilated and at % self.left_dilation == 0 for at in met)
        return found


def _windows(text: str, kernel: str, sizes: tuple[int, ...]) -> Iterator[tuple[str, _Window]]:
    """Yields the label and window of each spatial axis."""
    fields = dict(
        part.split("=") for part in first_group(r"window=\{([^}]*)\}", text).split() if "=" in part
    )
    for axis in filter(str.isdigit, kernel):

        def along(name: str, default: str, axis: int = int(axis)) -> str:
            values = fields.get(name, "").split("x")
            return values[axis] if axis < len(values) and values[axis] else default

        low = int(along("pad", "0_0").split("_")[0])
        size = int(along("size", str(sizes[kernel.index(axis)])))
        steps = (int(along(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        stride, left, right = steps
        yield axis, _Window(size, stride, low, left, right)
