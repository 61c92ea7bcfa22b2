"""The device mesh and the rules that shard arrays over it. Plain data, no JAX."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import Checked, ReadIf, Rule, field
from trainer.model.config import ModelConfig

AXES = ("data", "fsdp", "tensor")
# Mesh axes that divide the rows of a batch.
ROWS = ("data", "fsdp")

_INNER = (("mlp", "tensor"), ("heads", "tensor"), ("joined_kv", "tensor"))
# Pairs of (array axis, mesh axis that divides it), in order of precedence: a mesh axis divides one
# dimension of a tensor. Array axes without a rule are replicated.
# Sources: T5X, `partitioning.standard_logical_axis_rules` ("model" is our "tensor",
# parameter_partitioning_dims=2 our fsdp above 1); mu-transformer, "2D finalized" (Xu et al. 2021,
# arXiv:2105.04663, section 5.1), like T5X with both partitioning dims 2 but with a replicated
# vocabulary. Experts share a mesh axis with batch rows, as in Primer's Mesh TensorFlow.
RULES: Mapping[str, tuple[tuple[str, str | None], ...]] = {
    "standard": (("vocab", "tensor"), *_INNER, ("embed", "fsdp"), ("expert", "data")),
    "2d": (("vocab", None), *_INNER, ("embed", "tensor"), ("embed", "fsdp"), ("expert", "data")),
}


_SIZE = Rule("above 0, or -1", lambda value: value > 0 or value == -1)


@dataclass(frozen=True)
class MeshConfig(Checked):
    """A run's devices, arranged as a mesh of `data` times `fsdp` times `tensor`.

    One size may be -1: it takes all devices that the others leave.
    """

    data: int = field(
        -1,
        "divides the batch; every part has a copy of the parameters; -1: all remaining devices",
        rule=_SIZE,
    )
    fsdp: int = field(
        1,
        "divides batch, parameters and optimizer state; -1: all remaining devices",
        rule=_SIZE,
        often="shards of parameters and batch",
    )
    tensor: int = field(
        1,
        "divides heads, hidden units and, with rules standard, the vocabulary (T5X's "
        "num_partitions); -1: all remaining devices",
        rule=_SIZE,
        aliases=("num_partitions",),
        often="shards of heads and hidden units",
    )
    rules: str = field(
        "standard",
        "which mesh axes divide which dimensions; standard: as in T5X; 2d: tensor also divides the "
        "embedding dimension, and nothing divides the vocabulary",
        choices=RULES,
    )
    divide_update: bool | None = field(
        None,
        "every part of data updates its own share of the parameters and keeps only its optimizer "
        "state (ZeRO-1), instead of all of them; None: true, except on TPU slices of more than 8 "
        "chips, where XLA sums whole gradients",
        read_if=ReadIf(
            lambda config: config.trainable is None and not config.names_on("tunings"),
            "with --trainable or added parameters, where every part updates all that learns",
            whole=True,
        ),
    )

    def planned(self) -> dict[str, int]:
        """Returns the sizes by axis; raises a UserError if more than one is -1."""
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        open_axes = [name for name, size in sizes.items() if size == -1]
        if len(open_axes) > 1:
            flags = " and ".join(f"--mesh.{name}=-1" for name in open_axes)
            raise UserError(
                f"{flags}: only one axis can take the remaining devices; set "
                f"--mesh.{open_axes[0]}=1"
            )
        return sizes

    def sizes(self, devices: int) -> dict[str, int]:
        """Returns the sizes by axis; raises a UserError if their product is not `devices`."""
        sizes = self.planned()
        fixed = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values() and devices % fixed == 0:
            return {name: devices // fixed if size == -1 else size for name, size in sizes.items()}
        if fixed != devices or -1 in sizes.values():
            shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != -1)
            raise UserError(
                f"a mesh of {shape} takes {'a multiple of ' * (-1 in sizes.values())}{fixed} "
                f"devices, but there are {devices}: set --mesh.data=-1 and the other sizes "
                f"so that their product divides {devices}"
            )
        return sizes


def check_dimensions(
    sizes: Mapping[str, int], rules: str, model: ModelConfig, rows: Sequence[int], microbatches: int
) -> None:
    """Rejects dimensions that a mesh cannot divide evenly; sizes not yet known (-1) count as 1.

    `rows` are a batch's rows in each phase of the run.
    """
    if model.encoder_sizes:
        check_dimensions(sizes, rules, model.of_encoder, rows, microbatches)
    size = {axis: max(sizes[axis], 1) for axis in AXES}
    flag = {axis: f"--mesh.{axis}={sizes[axis]}" for axis in AXES}
    # Heads stay whole: a divided head would have to be gathered for every product.
    heads = ("num_heads", model.num_heads)
    if conditional := getattr(model.part("mixer").options, "conditional_heads", None):
        heads = ("conditional_heads", conditional)
    dimensions = {
        "heads": heads,
        "mlp": ("mlp_dim", model.mlp_dim),
        "vocab": ("vocab_size", model.vocab_size),
        "embed": ("emb_dim", model.emb_dim),
        "expert": ("experts", getattr(model.part("feed_forward").options, "experts", 0)),
    }
    for name, axis in RULES[rules]:
        field, dimension = dimensions[{"joined_kv": "heads"}.get(name, name)]
        if axis and dimension % size[axis]:
            whole = f"the model's {field} {dimension}"
            raise UserError(f"{flag[axis]}: {whole} is not divisible by {size[axis]}")
    parts = size["data"] * size["fsdp"]
    for phase, number in enumerate(rows):
        if number % (parts * microbatches) == 0:
            continue
        within = f" in each of {microbatches} microbatches" if microbatches > 1 else ""
        name = f"--batch_schedule: {number} rows" if phase else f"--batch_size={number}"
        raise UserError(
            f"{name} cannot be divided among {parts} parts of the mesh "
            f"(data {size['data']} x fsdp {size['fsdp']}){within}: use a multiple of "
            f"{parts * microbatches}"
        )
