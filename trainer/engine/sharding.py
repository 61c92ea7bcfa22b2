"""Where arrays live: the mesh of a run, and by T5X's logical axes each array's place on it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tasks.terminal.command_line import UserError
from trainer.config.mesh import AXES, ROWS, RULES, MeshConfig
from trainer.model.paths import path_name

Tree = Any


def make_mesh(config: MeshConfig) -> Mesh:
    """All devices of all processes, on the axes "data", "fsdp" and "tensor".

    Raises:
      UserError: sizes that do not fit the number of devices.
    """
    sizes = config.sizes(jax.device_count())
    # Auto: the compiler propagates shardings from parameters and batch; none is in a type.
    return jax.make_mesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


@contextlib.contextmanager
def tracing_on(mesh: Mesh, rules: str) -> Iterator[None]:
    """While a model is traced: its modules know `mesh`, one of RULES and, as "batch", where rows
    are, to place experts by."""
    with mesh, nn.logical_axis_rules((*RULES[rules], ("batch", ROWS))):
        yield


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
    """The first axis divided over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(ROWS))


def parameter_shardings(mesh: Mesh, rules: str, params: Tree, logical_axes: Tree) -> Tree:
    """The sharding of each parameter, by one of RULES.

    `params` has shapes, `logical_axes` is that of `trainer.model.transformer.logical_axes`.

    Raises:
      UserError: a dimension does not divide among its devices; names the parameter.
    """

    def of(path: tuple, param: Any, names: PartitionSpec) -> NamedSharding:
        spec = nn.logical_to_mesh_axes(tuple(names), RULES[rules]) or PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        for size, axis in zip(param.shape, spec, strict=True):
            if axis and size % mesh.shape[axis]:
                raise UserError(
                    f"--mesh.{axis}={mesh.shape[axis]}: {path_name(path)} of shape {param.shape} "
                    f"has a dimension of {size}, which does not divide by {mesh.shape[axis]}"
                )
        return sharding

    return jax.tree_util.tree_map_with_path(of, params, logical_axes)


def like_parameters(mesh: Mesh, tree: Tree, params: Tree, shardings: Tree) -> Tree:
    """A sharding for each leaf of an optimizer's state: that of its parameter.

    A leaf belongs to the parameter with whose path its own path ends. One of another shape, a
    factored moment, is on every device: it is as much smaller than its parameter as a row is.
    """
    known = {
        path: (param.shape, sharding)
        for (path, param), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }

    def of(path: tuple, leaf: Any) -> NamedSharding:
        for first in range(len(path)):
            shape, sharding = known.get(path[first:], (None, None))
            if sharding is not None and shape == leaf.shape:
                return sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(of, tree)


def put_batch(batch: dict[str, Any], mesh: Mesh, batch_size: int | None = None) -> dict[str, Any]:
    """Moves a batch to the devices, its rows divided among data and fsdp.

    `batch` holds all of its rows in every process or, where `batch_size` is larger, those that
    `host_part` assigns to this one.
    """
    if jax.process_count() == 1:
        return jax.device_put(batch, rows(mesh))
    place = rows(mesh)
    return {
        name: jax.make_array_from_process_local_data(
            place, array, (batch_size or len(array), *array.shape[1:])
        )
        for name, array in batch.items()
    }


class HostPart(NamedTuple):
    """Part `host` of `hosts` equal parts of every batch."""

    host: int
    hosts: int


def host_part(mesh: Mesh, process: int | None = None) -> HostPart:
    """The rows of a batch that a process, by default this one, has to make.

    Processes that share rows, each having a part of the model, make the same ones. Where the mesh
    lies across processes so that their rows overlap in part, each makes the whole batch.
    """
    process = jax.process_index() if process is None else process
    parts: dict[int, set[int]] = {}
    for place, device in np.ndenumerate(mesh.devices):
        row_part = place[0] * mesh.devices.shape[1] + place[1]
        parts.setdefault(device.process_index, set()).add(row_part)
    distinct = sorted({tuple(sorted(each)) for each in parts.values()})
    together = [part for each in distinct for part in each]
    if len(set(together)) < len(together) or len({len(each) for each in distinct}) > 1:
        return HostPart(0, 1)
    return HostPart(distinct.index(tuple(sorted(parts[process]))), len(distinct))


def describe(mesh: Mesh, rules: str, state: Any) -> tuple[str, str]:
    """A (subject, text) line: the mesh, and what a device holds of the state.

    `state` is a TrainState of arrays or of shapes with shardings.
    """
    shape = " x ".join(f"{axis} {mesh.shape[axis]}" for axis in AXES)
    params = sum(math.prod(_shard_shape(leaf)) for leaf in jax.tree.leaves(state.params))
    held = sum(
        math.prod(_shard_shape(leaf)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((state.params, state.opt_state))
    )
    hosts = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return (
        "mesh",
        f"{shape}, {mesh.size} {mesh.devices.flat[0].platform} device(s){hosts}, rules {rules}: "
        f"{params:,} parameters and {held / 1e6:,.1f} MB of state a device",
    )


def _shard_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.sharding.shard_shape(leaf.shape)
