"""Sharding: a run's mesh, and the placement of arrays on it according to T5X's logical axes."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tasks.terminal.command_line import UserError
from trainer.config.mesh import AXES, ROWS, RULES, MeshConfig
from trainer.model.paths import path_name
from trainer.optim.stacked import STACK_AXES

Tree = Any
# Parts of "data" in a TPU slice up to which XLA makes reduce-scatters. With more it sums whole
# gradients everywhere, so that gathers come on top (docs/decisions/028-the-update-in-shares.md).
_MOST_SCATTERED = 8

# Elements of a parameter below which every device updates all of it: summing and gathering parts
# would take more messages than it saves work.
_SMALLEST_DIVIDED = 2**16


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of all processes' devices, with axes "data", "fsdp" and "tensor".

    The devices of several TPU slices lie along "data", the axis with the least communication.
    Raises a UserError if the sizes do not fit the number of devices or slices.
    """
    devices = list(devices or jax.devices())
    sizes = config.sizes(len(devices))
    shape = tuple(sizes[axis] for axis in AXES)
    # Auto: the compiler propagates shardings from parameters and batch, outside the type system.
    types = (AxisType.Auto,) * len(AXES)
    slices = _slices(devices)
    if sizes["data"] % slices:
        raise UserError(
            f"--mesh.data={sizes['data']} is not divisible by the {slices} slices, which only "
            f"data can span: use a multiple of {slices}"
        )
    # Allows half of a physical axis, for example for 8 of 4 x 4 x 4 chips, where no whole axes fit.
    split = {"allow_split_physical_axes": True}
    if slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, **split)
    else:
        within = (sizes["data"] // slices, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(within, (slices, 1, 1), devices, **split)
    return Mesh(grid, AXES, axis_types=types)


@contextlib.contextmanager
def tracing_on(mesh: Mesh, rules: str) -> Iterator[None]:
    """Exposes the mesh and its rules, one of RULES, to modules while a model is traced."""
    axes = (*RULES[rules], ("batch", ROWS))  # "batch" is for experts
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(axes):
        yield


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the replicated sharding."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that divides the first axis over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def parameter_shardings(mesh: Mesh, rules: str, params: Tree, logical_axes: Tree) -> Tree:
    """Returns the sharding of each parameter; raises a UserError if one does not divide evenly."""

    def sharding_of(path: tuple, param: Any, names: PartitionSpec) -> NamedSharding:
        spec = nn.logical_to_mesh_axes(tuple(names), RULES[rules]) or PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        for size, axis in zip(param.shape, spec, strict=True):
            if axis and size % mesh.shape[axis]:
                raise UserError(
                    f"--mesh.{axis}={mesh.shape[axis]}: {path_name(path)} of shape {param.shape} "
                    f"has a dimension of {size}, which is not divisible by {mesh.shape[axis]}"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(sharding_of, params, logical_axes)


def divides_update(config: MeshConfig, mesh: Mesh) -> bool:
    """Returns True if every part of "data" updates a share of the parameters of its own."""
    parts, devices = mesh.shape["data"], [*mesh.devices.flat]
    scatters = devices[0].platform != "tpu" or parts // _slices(devices) <= _MOST_SCATTERED
    return parts > 1 and (scatters if config.divide_update is None else config.divide_update)


def _slices(devices: Sequence[jax.Device]) -> int:
    """Returns the number of TPU slices; 1 without TPUs, as JAX calls every machine of GPUs one."""
    on_tpu = devices[0].platform == "tpu"
    return len({getattr(device, "slice_index", 0) for device in devices if on_tpu}) or 1


def divided_over_data(mesh: Mesh, params: Tree, shardings: Tree, logical_axes: Tree) -> Tree:
    """Returns `shardings` with the shards of large parameters divided over "data".

    Divides the first dimension that splits evenly, if possible into multiples of 8 (rows of a
    TPU's tile), but no stack of layers, which passes read one by one.
    """
    data = mesh.shape["data"]

    def divided(param: Any, sharding: NamedSharding, names: PartitionSpec) -> NamedSharding:
        spec = [*sharding.spec, *[None] * (param.ndim - len(sharding.spec))]
        shard = sharding.shard_shape(param.shape)
        if param.size < _SMALLEST_DIVIDED or "data" in spec:
            return sharding
        even = [
            axis
            for axis, size in enumerate(shard)
            if names[axis] not in STACK_AXES and size % data == 0
        ]
        tiled = [axis for axis in even if shard[axis] // data % 8 == 0]
        if not even:
            return sharding
        axis = (tiled or even)[0]
        spec[axis] = "data" if spec[axis] is None else (spec[axis], "data")
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(divided, params, shardings, logical_axes)


def like_parameters(mesh: Mesh, tree: Tree, params: Tree, shardings: Tree) -> Tree:
    """Returns a sharding for each leaf of an optimizer's state: its parameter's.

    A leaf belongs to the parameter whose path is a suffix of the leaf's. Leaves of another shape,
    such as factored moments, are replicated: they are at most a row or column of the parameter.
    """
    known = {
        path: (param.shape, sharding)
        for (path, param), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }

    def sharding_of(path: tuple, leaf: Any) -> NamedSharding:
        for first in range(len(path)):
            shape, sharding = known.get(path[first:], (None, None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def put_batch(batch: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Puts a batch on the devices, given all its rows."""
    return put_part(batch, mesh, 1)


def put_part(batch: dict[str, Any], mesh: Mesh, hosts: int) -> dict[str, Any]:
    """Puts a batch on the devices, given this host's part of `hosts` equal parts of its rows."""
    sharding = rows(mesh)
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return {
        name: jax.make_array_from_process_local_data(
            sharding, array, (len(array) * hosts, *array.shape[1:])
        )
        for name, array in batch.items()
    }


class HostPart(NamedTuple):
    """Part `host` of `hosts` equal parts of every batch."""

    host: int
    hosts: int


def host_part(mesh: Mesh, process: int | None = None) -> HostPart:
    """Returns the part of every batch's rows that a process (None: this one) makes.

    Processes that hold parts of the model for the same rows all make these rows. If the rows of
    processes overlap partially, each process makes the whole batch.
    """
    process = jax.process_index() if process is None else process
    # Process index -> indices of the batch parts that its devices hold.
    parts: dict[int, set[int]] = {}
    for index, device in np.ndenumerate(mesh.devices):
        row_part = index[0] * mesh.devices.shape[1] + index[1]
        parts.setdefault(device.process_index, set()).add(row_part)
    distinct = sorted({tuple(sorted(each)) for each in parts.values()})
    together = [part for each in distinct for part in each]
    overlapping = len(set(together)) < len(together)
    if overlapping or len({len(each) for each in distinct}) > 1:
        return HostPart(0, 1)
    return HostPart(distinct.index(tuple(sorted(parts[process]))), len(distinct))


def describe(mesh: Mesh, rules: str, state: Any) -> tuple[str, str]:
    """Returns a (subject, text) line about the mesh and the state's size per device."""
    shape = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES)
    params = sum(map(_elements, jax.tree.leaves(state.params)))
    leaves = jax.tree.leaves((state.params, state.opt_state))
    size = sum(_elements(leaf) * leaf.dtype.itemsize for leaf in leaves)
    hosts = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        "mesh",
        f"{shape}, {mesh.size} {mesh.devices.flat[0].platform} device(s){hosts}, rules {rules}: "
        f"{params:,} parameters and {size / 1e6:,.1f} MB of state per device",
    )


def _elements(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape))
