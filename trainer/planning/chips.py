"""Facts about TPU chips that a plan needs: clock, memory, links, price. Plain data, no JAX.

Peak operations per second are in `trainer.engine.hardware`.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPU chips.

    Attributes:
      kind: JAX's `device_kind`.
      clock: cycles per second, the unit of the compiler's estimates.
      memory: bytes of HBM that a program may use, without the runtime's share.
      memory_bandwidth: HBM bytes per second.
      axes: dimensions of the interconnect: 2 or 3.
      link: bytes per second of one link in one direction; a chip has two links per axis.
      wraps: axes whose length is a multiple of this are rings.
      network: bytes per second of a chip over the data-centre network, between slices.
      dollars: price per chip-hour.
      largest: chips of the largest slice along each axis.
      config: the compiler's name of the layout with one JAX device per chip.
    """

    kind: str
    clock: float
    memory: int
    memory_bandwidth: float
    axes: int
    link: float
    wraps: int
    network: float
    dollars: float
    largest: tuple[int, ...]
    config: str = "default"


# Source and date of the prices below.
PRICES = "cloud.google.com/tpu/pricing, on demand, cheapest US region, as of June 2025"

# Clocks follow from peak operations: cores x MXUs x 2 x size^2 x clock. Usable memory is less than
# the chip's; compiler errors name it ("Used 33.07G of 31.25G hbm"), as in EasyDeL's issue 166 (v4)
# and Enzyme-JAX's pull request 2422 (v6e).
# Sources: docs.cloud.google.com/tpu/docs, system architecture of each version (bandwidth of memory,
# interconnect and network per chip); a link's bandwidth is the interconnect's divided by the number
# of links. v4's network bandwidth is not published; v5p's is used.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v4": Chip(
            *("TPU v4", 1.05e9, int(30.75 * _GIB), 1.2e12, 3, 50e9, 4, 6.25e9, 3.22, (16, 16, 16)),
            "megacore",
        ),
        "v5e": Chip(
            "TPU v5 lite", 1.5e9, int(15.75 * _GIB), 0.819e12, 2, 50e9, 16, 3.125e9, 1.20, (16, 16)
        ),
        "v5p": Chip(
            "TPU v5", 1.75e9, int(95.74 * _GIB), 2.765e12, 3, 100e9, 4, 6.25e9, 4.20, (16, 16, 24)
        ),
        "v6e": Chip(
            "TPU v6 lite", 1.75e9, int(31.25 * _GIB), 1.6e12, 2, 100e9, 16, 12.5e9, 2.70, (16, 16)
        ),
    }
)


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind`; None if it is not in the table."""
    return next((chip for chip in CHIPS.values() if chip.kind == device_kind), None)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a device: its slice, and its chip's coordinates within the slice."""

    slice: int
    coordinates: tuple[int, ...]


def seconds_of_collective(
    chip: Chip, sent: int, group: list[Place], shape: tuple[int, ...]
) -> float:
    """Returns the seconds of a collective within a slice, at the bandwidth of its links.

    Latency and other traffic are not counted. `sent` are bytes per device, `group` the devices that
    exchange, and `shape` the chips of a slice along each axis.
    """
    return sent / (_links(chip, group, shape) * chip.link)


def sent_bytes(kind: str, size: int, group: int) -> int:
    """Returns the bytes that a device sends with the algorithm that sends the fewest.

    `size` is the bytes of the whole array on one device (the larger of argument and result),
    `group` the number of devices or slices.
    """
    if group < 2:
        return 0
    if kind == "collective-permute":
        return size
    passes = 2 if kind == "all-reduce" else 1
    return passes * size * (group - 1) // group


def _links(chip: Chip, group: list[Place], shape: tuple[int, ...]) -> int:
    """Returns how many links of a chip a group within a slice uses, at least 1."""
    extents = [
        len({place.coordinates[axis] for place in group})
        for axis in range(len(group[0].coordinates))
    ]
    links = 0
    for extent, length in zip(extents, shape, strict=True):
        if extent > 1:
            # An open row of chips has half the bandwidth of a ring.
            links += 2 if extent == length and length % chip.wraps == 0 else 1
    return max(links, 1)


def slice_shape(places: list[Place]) -> tuple[int, ...]:
    """Returns the chips of a slice along each axis of the interconnect."""
    return tuple(1 + max(axis) for axis in zip(*(each.coordinates for each in places), strict=True))


def chips_in(shape: tuple[int, ...]) -> int:
    """Returns the number of chips of a slice."""
    return math.prod(shape)
