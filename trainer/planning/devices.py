"""The devices that a run is planned for: an absent TPU slice's or local ones."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from typing import Any

from tasks.terminal.command_line import UserError
from trainer.planning.chips import CHIPS, Chip, Place, chips_in

_TOPOLOGY = re.compile(r"(?:(\d+)x)?(v\w+):(\d+(?:x\d+)+)")
_EXAMPLES = "v5e:4x4, v5p:4x4x4, v4:2x2x4, v6e:16x16, or 2xv5e:16x16 for two slices"
# A host has 2 x 2 chips, except where a slice is a single chip.
_HOST = (2, 2, 1)


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of TPU chips, as "v5e:4x4" or "2xv5e:4x4"; `generation` is a key of CHIPS."""

    name: str
    generation: str
    shape: tuple[int, ...]
    slices: int

    @classmethod
    def named(cls, name: str) -> Topology:
        """Parses the name of a topology; raises UserError if there is no such topology."""
        found = _TOPOLOGY.fullmatch(name)
        if not found or found[2] not in CHIPS:
            raise UserError(
                f"--topology={name}: unknown; it is GENERATION:SHAPE, with a generation of "
                f"{', '.join(CHIPS)}, as {_EXAMPLES}"
            )
        shape = tuple(int(size) for size in found[3].split("x"))
        axes = CHIPS[found[2]].axes
        if len(shape) != axes:
            example = "x".join(["4"] * axes)
            raise UserError(f"--topology={name}: {found[2]} slices have {axes} axes, as {example}")
        whole = all(size % host == 0 for size, host in zip(shape, _HOST, strict=False))
        if not all(shape) or not (whole or chips_in(shape) == 1) or found[1] == "0":
            raise UserError(
                f"--topology={name}: hosts have 2 x 2 chips, so the first two sizes must be even "
                "and above 0"
            )
        largest = CHIPS[found[2]].largest
        # Slices of two axes are 2, 4, 8 or 16 chips wide; of three axes, multiples of 4 x 4 x 4.
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
        """Number of hosts of all slices."""
        return max(chips_in(self.shape) // chips_in(_HOST), 1) * self.slices

    def devices(self) -> list[Any]:
        """Returns devices to compile programs for, not to run them."""
        from jax.experimental import topologies

        options: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
        if chips_in(self.shape) == 1:
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
    """Returns the place of a TPU device."""
    return Place(getattr(device, "slice_index", 0) or 0, tuple(device.coords))
