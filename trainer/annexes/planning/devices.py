"""TPU chips (clock, memory, links, price) and slices, and the devices for which a run is planned.

Peak operations per second are in `trainer.engine.hardware`.
"""

import collections
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from tasks.terminal.command_line import UserError

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a device: its slice, and its chip's coordinates within the slice.

    A GPU's coordinates are its host and its number.
    """

    slice: int
    coordinates: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rates:
    """The shares of a data sheet's figures that programs reach.

    Attributes:
      products: of the peak, in products; a TPU's schedules take longer by the same factor.
      memory: of the HBM's bandwidth.
      links: of the bandwidth that collectives are booked at.
      kernels: of a GPU's peak, in Pallas kernels.
    """

    products: float = 1.0
    memory: float = 1.0
    links: float = 1.0
    kernels: float = 1.0


PEAK = Rates()


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The least and the largest ratio of measured to expected time, over `rows` published steps.

    Source: `python -m benchmarks.calibrate`.
    """

    least: float
    largest: float
    rows: int


@dataclasses.dataclass(frozen=True)
class Chip:
    """A generation of TPU chips.

    Attributes:
      kind: JAX's `device_kind`.
      clock: cycles per second, the unit of the compiler's estimates.
      memory: bytes of HBM that a program may use, without the runtime's share.
      memory_bandwidth: HBM bytes per second.
      axes: dimensions of the interconnect: 2 or 3.
      link: bytes per second that one link reaches in one direction; a chip has two per axis.
      wraps: axes whose length is a multiple of this are rings.
      network: bytes per second that a chip sends to other slices over the data-centre network.
      dollars: price per chip-hour.
      largest: number of chips along each axis of the largest slice.
      config: the compiler's name for the layout with one JAX device per chip.
      matrix_unit: rows and columns of an MXU.
      rates: what programs reach of these figures.
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
    matrix_unit: int = 128
    rates: Rates = PEAK

    # Where times come from, and the unit of the price.
    basis = "lower bounds from the compiler's schedules"
    unit = "chip"
    calibration = Calibration(0.93, 1.16, 5)
    # Source and date of the prices below.
    prices = "cloud.google.com/tpu/pricing, on demand, cheapest US region, as of June 2025"

    def seconds_of_collective(self, sent: int, group: list[Place], shape: tuple[int, ...]) -> float:
        """Returns the seconds of a collective within a slice, at the bandwidth of its links.

        Latency and other traffic are not counted. `sent` is bytes per device, `group` the devices
        that exchange data, and `shape` the number of chips along each axis of a slice.
        """
        # The links per chip that the group uses; an open row of chips has half the bandwidth of a
        # ring.
        links = 0
        for axis, length in enumerate(shape):
            extent = len({place.coordinates[axis] for place in group})
            if extent > 1:
                links += 2 if extent == length and length % self.wraps == 0 else 1
        return sent / (max(links, 1) * self.link)

    def seconds_of_permutation(
        self, sent: int, pairs: list[tuple[Place, Place]], shape: tuple[int, ...]
    ) -> float:
        """Returns the seconds in which each sender's bytes reach its receiver.

        Bytes go along one axis after another, the shorter way round a ring; the link with the most
        messages decides.
        """
        loads: collections.Counter[tuple] = collections.Counter()
        for sender, receiver in pairs:
            at = [*sender.coordinates]
            for axis, length in enumerate(shape):
                distance = receiver.coordinates[axis] - at[axis]
                if length % self.wraps == 0 and abs(distance) > length / 2:
                    distance -= length if distance > 0 else -length
                for _ in range(abs(distance)):
                    step = 1 if distance > 0 else -1
                    loads[*at, axis, step] += 1
                    at[axis] = (at[axis] + step) % length
        return sent * max(loads.values(), default=0) / self.link


# Clocks follow from peak operations, cores x MXUs x 2 x size^2 x clock. Usable memory is less than
# the chip's; compiler errors name it ("Used 33.07G of 31.25G hbm"), as in EasyDeL's issue 166 (v4)
# and Enzyme-JAX's pull request 2422 (v6e).
# Sources: docs.cloud.google.com/tpu/docs, system architecture of each version (bandwidth of memory,
# interconnect and network per chip); v4's network bandwidth is not published, v5p's is used. Links:
# what programs reach, jax-ml.github.io/scaling-book, chapter 2, table of TPU specifications; the
# data sheets' totals divided by the number of links are a tenth higher.
CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "v4": Chip(
            *("TPU v4", 1.05e9, int(30.75 * _GIB), 1.2e12, 3, 45e9, 4, 6.25e9, 3.22, (16, 16, 16)),
            "megacore",
        ),
        "v5e": Chip(
            "TPU v5 lite", 1.5e9, int(15.75 * _GIB), 0.819e12, 2, 45e9, 16, 3.125e9, 1.20, (16, 16)
        ),
        "v5p": Chip(
            "TPU v5", 1.75e9, int(95.74 * _GIB), 2.765e12, 3, 90e9, 4, 6.25e9, 4.20, (16, 16, 24)
        ),
        "v6e": Chip(
            *("TPU v6 lite", 1.75e9, int(31.25 * _GIB), 1.6e12, 2, 90e9, 16, 12.5e9, 2.70),
            largest=(16, 16),
            matrix_unit=256,
        ),
    }
)


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip with this `device_kind`; None if it is not in the table."""
    return next((chip for chip in CHIPS.values() if chip.kind == device_kind), None)


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


def slice_shape(places: list[Place]) -> tuple[int, ...]:
    """Returns the number of chips along each axis of a slice."""
    return tuple(
        1 + max(axis) for axis in zip(*(place.coordinates for place in places), strict=True)
    )


_TOPOLOGY = re.compile(r"(?:(\d+)x)?(v\w+):(\d+(?:x\d+)+)")
_EXAMPLES = "v5e:4x4, v5p:4x4x4, v4:2x2x4, v6e:16x16, or 2xv5e:16x16 for two slices"
# A host has 2 x 2 chips, except where a slice is a single chip.
_HOST = (2, 2, 1)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of TPU chips, such as "v5e:4x4" or "2xv5e:4x4"; `generation` is a key of CHIPS."""

    name: str
    generation: str
    shape: tuple[int, ...]
    slices: int

    @classmethod
    def named(cls, name: str) -> Self:
        """Parses the name of a topology; raises UserError if no topology has that name."""
        found = _TOPOLOGY.fullmatch(name)
        if not found or found[2] not in CHIPS:
            raise UserError(
                f"--topology={name} is unknown; it must be GENERATION:SHAPE, with a generation of "
                f"{', '.join(CHIPS)}, such as {_EXAMPLES}; or h100:8 and a100:8 for a host of "
                "GPUs, h100:4x8 for four hosts"
            )
        shape = tuple(int(size) for size in found[3].split("x"))
        axes = CHIPS[found[2]].axes
        if len(shape) != axes:
            example = "x".join(["4"] * axes)
            raise UserError(f"--topology={name}: {found[2]} has {axes} axes, such as {example}")
        whole = all(size % host == 0 for size, host in zip(shape, _HOST, strict=False))
        if not all(shape) or not (whole or math.prod(shape) == 1) or found[1] == "0":
            raise UserError(
                f"--topology={name}: hosts have 2 x 2 chips, so the first two sizes must be even "
                "and above 0"
            )
        largest = CHIPS[found[2]].largest
        # Slices with two axes are 2, 4, 8 or 16 chips wide; with three, multiples of 4 x 4 x 4.
        there = all(size in (1, 2, 4, 8, 16) or (axes == 3 and size % 4 == 0) for size in shape)
        sizes = zip(sorted(shape), sorted(largest), strict=True)
        if not there or any(size > most for size, most in sizes):
            raise UserError(
                f"--topology={name}: there is no such slice; sizes are 2, 4, 8 or 16"
                f"{', or multiples of 4' if axes == 3 else ''}, and the largest slice is "
                f"{found[2]}:{'x'.join(map(str, largest))}"
            )
        return cls(name, found[2], shape, int(found[1] or 1))

    @property
    def chip(self) -> Chip:
        """The generation's chip."""
        return CHIPS[self.generation]

    @property
    def hosts(self) -> int:
        """Number of hosts in all slices."""
        return max(math.prod(self.shape) // math.prod(_HOST), 1) * self.slices

    def devices(self) -> list[Any]:
        """Returns devices for which programs can be compiled but not run."""
        from jax.experimental import topologies

        options: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
        if math.prod(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        if self.chip.config != "default":
            options["chip_config_name"] = self.chip.config
        shape = "x".join(map(str, self.shape))
        try:
            description = topologies.get_topology_desc(
                topology_name=f"{self.generation}:{shape}", platform="tpu", **options
            )
        except Exception as error:
            first = str(error).strip().splitlines()[0]
            raise UserError(f"--topology={self.name}: the TPU's compiler says: {first}") from error
        return list(description.devices)


def prepare_compiler() -> None:
    """Sets up the TPU's compiler for machines without a TPU; call it before JAX starts."""
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "--topology needs the TPU's compiler, libtpu, which is not installed: "
            "pip install --constraint constraints.txt '.[tpu]'; without --topology the plan is for "
            "the devices of this machine"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    # There is no metadata server to query and no chip to share between processes.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")


def place_of(device: Any) -> Place:
    """Returns the place of a device."""
    if device.platform == "gpu":
        return Place(0, (device.process_index, device.id))
    return Place(getattr(device, "slice_index", 0) or 0, tuple(device.coords))
