"""How devices divide the work, in plain data that needs no JAX: the mesh and rules for arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tasks.terminal.command_line import UserError
from trainer.model.config import ModelConfig

AXES = ("data", "fsdp", "tensor")
# A batch's rows lie on these axes.
ROWS = ("data", "fsdp")

# From the name of an array's axis to an axis of the mesh, in order of precedence: of a tensor, each
# axis of the mesh divides one dimension. What no rule names is on every device.
# Sources: T5X, `partitioning.standard_logical_axis_rules`, whose "model" is our "tensor", whose
# parameter_partitioning_dims=2 is fsdp above 1; mu-transformer, "2D finalized" (Xu et al. 2021,
# arXiv:2105.04663, section 5.1), which differs from T5X's two 2s in that nothing divides the
# vocabulary. Experts lie along the rows that they serve, as in Primer's Mesh TensorFlow.
RULES: Mapping[str, tuple[tuple[str, str | None], ...]] = MappingProxyType(
    {
        "standard": (
            ("vocab", "tensor"),
            ("mlp", "tensor"),
            ("heads", "tensor"),
            ("joined_kv", "tensor"),
            ("embed", "fsdp"),
            ("expert", "data"),
        ),
        "2d": (
            ("vocab", None),
            ("mlp", "tensor"),
            ("heads", "tensor"),
            ("joined_kv", "tensor"),
            ("embed", "tensor"),
            ("embed", "fsdp"),
            ("expert", "data"),
        ),
    }
)


@dataclass(frozen=True)
class MeshConfig:
    """The devices of a run as a mesh of `data` times `fsdp` times `tensor`.

    One size may be -1: all devices that the others leave. Rows of a batch are divided over `data`
    and `fsdp`; parameters and the optimizer's state over `fsdp` and, where a dimension has heads,
    hidden units or (not under "2d") the vocabulary, over `tensor`, as `rules`, one of RULES, say.

    `num_partitions` is T5X's: the devices among which a model is divided, another word for
    `tensor`.

    Raises:
        ValueError: at construction, naming the field, if a value makes no sense.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    rules: str = "standard"
    num_partitions: int | None = None

    def __post_init__(self) -> None:
        if self.rules not in RULES:
            raise ValueError(
                f"MeshConfig.rules is {self.rules!r}; it must be one of {', '.join(RULES)}"
            )
        for name in (*AXES, "num_partitions"):
            size = getattr(self, name)
            if size is not None and (size < -1 or size == 0):
                raise ValueError(f"MeshConfig.{name} is {size}; it must be above 0, or -1")
        if self.num_partitions is not None:
            if self.num_partitions < 1:
                raise ValueError(
                    f"MeshConfig.num_partitions is {self.num_partitions}; it must be above 0"
                )
            if self.tensor != 1:
                raise ValueError(
                    f"MeshConfig.num_partitions is {self.num_partitions} and MeshConfig.tensor "
                    f"{self.tensor}: they are two words for one thing, set one of them"
                )

    def planned(self) -> dict[str, int]:
        """Sizes by axis, of which one may be -1.

        Raises:
          UserError: two are -1.
        """
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.num_partitions or self.tensor}
        open_axes = [name for name, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            flags = " and ".join(f"--mesh.{name}=-1" for name in open_axes)
            raise UserError(
                f"{flags}: one axis alone can take the rest of the devices; set "
                f"--mesh.{open_axes[0]}=1"
            )
        return sizes

    def sizes(self, devices: int) -> dict[str, int]:
        """Sizes by axis, on so many devices.

        Raises:
          UserError: their product is not `devices`.
        """
        sizes = self.planned()
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values() and devices % fixed == 0:
            return {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
        if fixed != devices or -1 in sizes.values():
            shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != -1)
            raise UserError(
                f"a mesh of {shape} takes {'a multiple of ' * (-1 in sizes.values())}{fixed} "
                f"devices, and there are {devices}: set --mesh.data=-1 and sizes of the others "
                f"whose product divides {devices}"
            )
        return sizes


def check_dimensions(
    sizes: Mapping[str, int], rules: str, model: ModelConfig, batch_size: int, microbatches: int
) -> None:
    """Refuses what a mesh of these sizes cannot divide evenly; sizes still open (-1) count as 1.

    Raises:
      UserError: names the dimension, its size and the flag.
    """
    size = {axis: max(sizes[axis], 1) for axis in AXES}
    flag = {axis: f"--mesh.{axis}={sizes[axis]}" for axis in AXES}
    # Heads are kept whole: half a head on a device would be fetched for every product.
    dimensions = {
        "heads": ("num_heads", model.num_heads),
        "mlp": ("mlp_dim", model.mlp_dim),
        "vocab": ("vocab_size", model.vocab_size),
        "embed": ("emb_dim", model.emb_dim),
        "expert": ("num_experts", model.num_experts),
    }
    for name, axis in RULES[rules]:
        field, dimension = dimensions[{"joined_kv": "heads"}.get(name, name)]
        if axis and dimension % size[axis]:
            raise UserError(
                f"{flag[axis]}: the model's {field} {dimension} does not divide by {size[axis]}"
            )
    parts = size["data"] * size["fsdp"]
    if batch_size % (parts * microbatches):
        within = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
        raise UserError(
            f"--batch_size={batch_size} does not divide among {parts} parts of the mesh "
            f"(data {size['data']} x fsdp {size['fsdp']}){within}: use a multiple of "
            f"{parts * microbatches}"
        )
