"""Compiles T5X's training step for a TPU slice; benchmarks.tpu_step runs this program.

The argument is JSON: `benchmarks.t5x.sizes`, "topology" and "submesh". Prints a line of JSON, the
fields of `benchmarks.tpu_step.Estimate`, by the yardstick of `trainer.annexes.planning.timing`.
"""

import json
import sys
import time
from functools import cached_property
from typing import Any

from trainer.annexes.planning.plan import target_of


def main() -> None:
    sizes = json.loads(sys.argv[1])
    target = target_of(sizes["topology"])

    import jax
    from t5x import partitioning

    from benchmarks.t5x_step import make_batch, make_trainer
    from trainer.annexes.planning.compiled import module_of
    from trainer.annexes.planning.devices import place_of
    from trainer.annexes.planning.memory import BATCH, OPTIMIZER_STATE, PARAMETERS, memory
    from trainer.annexes.planning.timing import timing

    class Partitioner(partitioning.PjitPartitioner):
        """T5X's partitioner for devices that JAX does not list."""

        @cached_property
        def mesh(self) -> jax.sharding.Mesh:
            first = [device for device in target.devices if device.process_index == 0]
            return partitioning.get_mesh(self._model_parallel_submesh, target.devices, first)

    def held(leaf: Any, sharding: jax.sharding.Sharding | None) -> Any:
        # The compiler leaves out arguments that nothing reads.
        return sharding and jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    jax.config.update("jax_enable_compilation_cache", False)
    # T5X leaves constraints out where the first of JAX's own devices is a CPU.
    partitioning.with_sharding_constraint = jax.lax.with_sharding_constraint
    rules = partitioning.standard_logical_axis_rules()
    submesh = tuple(sizes["submesh"])
    partitioner = Partitioner(model_parallel_submesh=submesh, logical_axis_rules=rules)
    begin = time.monotonic()
    run = make_trainer(sizes, partitioner, abstract=True)
    batch = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype)
        for name, each in make_batch(sizes).items()
    }
    try:
        compiled = partitioner.compile(run._partitioned_train_step, run.train_state, batch)
    except jax.errors.JaxRuntimeError as error:
        answer = {"seconds": {}, "bytes": {}, "refused": str(error).strip().splitlines()[0]}
        print(json.dumps(answer))
        return
    state, rows = jax.tree.map(held, (run.train_state, batch), compiled.input_shardings[0])
    arguments = {PARAMETERS: state.params, OPTIMIZER_STATE: state.param_states, BATCH: rows}
    module = module_of(compiled, target)
    places = [place_of(device) for device in partitioner.mesh.devices.flat]
    cores = getattr(target.devices[0], "num_cores", None) or 1
    times = timing(module, target.chip, places, [], target.schedules.read(module), cores)
    vocab_size = sizes["network"]["vocab_size"]
    answer = {
        "seconds": times.seconds,
        "bytes": memory(compiled, module, arguments, vocab_size).parts,
        "xla": times.estimated_step,
        "compile_seconds": time.monotonic() - begin,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
