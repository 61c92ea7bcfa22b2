"""Compiles T5X's training step for a TPU slice; benchmarks.tpu_step runs this program.

The argument is JSON: the sizes of `benchmarks.t5x.sizes`, and "topology", "submesh" and
"parameter_dims". Prints a line of JSON: bytes and seconds by part, by the parser of
`trainer.planning`.
"""

import json
import sys
import time
from functools import cached_property
from typing import Any

from trainer.planning import devices

devices.prepare_compiler()

import jax  # noqa: E402
from t5x import partitioning  # noqa: E402

from benchmarks.t5x_program import batch_shapes, make_trainer  # noqa: E402
from trainer.planning import hlo  # noqa: E402
from trainer.planning.memory import BATCH, OPTIMIZER_STATE, PARAMETERS, memory  # noqa: E402
from trainer.planning.timing import timing  # noqa: E402


class _Partitioner(partitioning.PjitPartitioner):
    """T5X's partitioner for devices that JAX does not list."""

    def __init__(self, slice_devices: list, submesh: list[int], parameter_dims: int):
        rules = partitioning.standard_logical_axis_rules(parameter_partitioning_dims=parameter_dims)
        super().__init__(model_parallel_submesh=tuple(submesh), logical_axis_rules=rules)
        self._devices = slice_devices

    @cached_property
    def mesh(self) -> jax.sharding.Mesh:
        return partitioning.get_mesh(
            self._model_parallel_submesh,
            self._devices,
            [device for device in self._devices if device.process_index == 0],
        )


def main() -> None:
    sizes = json.loads(sys.argv[1])
    jax.config.update("jax_enable_compilation_cache", False)
    # T5X leaves constraints out where the first of JAX's own devices is a CPU.
    partitioning.with_sharding_constraint = jax.lax.with_sharding_constraint
    topology = devices.Topology.named(sizes["topology"])
    partitioner = _Partitioner(topology.devices(), sizes["submesh"], sizes["parameter_dims"])
    begin = time.monotonic()
    run = make_trainer(sizes, partitioner, abstract=True)
    state = run.train_state
    try:
        compiled = partitioner.compile(run._partitioned_train_step, state, batch_shapes(sizes))
    except jax.errors.JaxRuntimeError as error:
        print(json.dumps({"refused": str(error).strip().splitlines()[0]}))
        return
    held, batch = jax.tree.map(_sharded, (state, batch_shapes(sizes)), compiled.input_shardings[0])
    arguments = {PARAMETERS: held.params, OPTIMIZER_STATE: held.param_states, BATCH: batch}
    module = hlo.parse(compiled.as_text())
    places = [devices.place_of(device) for device in partitioner.mesh.devices.flat]
    times = timing(module, topology.chip, places, [], {})
    vocab_size = sizes["network"]["vocab_size"]
    answer = {
        "bytes": memory(compiled, module, arguments, vocab_size).parts,
        "seconds": times.seconds,
        "unpriced": times.unpriced,
        "mesh": dict(partitioner.mesh.shape),
        "compile_seconds": time.monotonic() - begin,
    }
    print(json.dumps(answer))


def _sharded(leaf: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """Returns a shape with its sharding; None for an argument that the compiler left out."""
    return sharding and jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


if __name__ == "__main__":
    main()
