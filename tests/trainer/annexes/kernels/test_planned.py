"""Plans know the kernels, and those for GPUs compile where there is none."""

import os
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.support.processes import ROOT, started
from tests.trainer.annexes.kernels.test_fused_attention import (
    COMPILED,
    B,
    Neighbours,
    example,
    whole_bias_of,
)
from tests.trainer.annexes.kernels.test_triton_attention import attend
from trainer.annexes.kernels.fused_attention import fused_attention
from trainer.annexes.kernels.fused_sparsity import tables_of
from trainer.model.masks import Mask, Rows

kernels = pytest.importorskip("trainer.annexes.planning.kernels")
schedules = pytest.importorskip("trainer.annexes.planning.schedules")


def test_a_kernel_over_a_layout_tells_how_many_tiles_it_visits():
    pattern, length = Neighbours(128), 512
    layout = tables_of(pattern, 2, 64, length, Mask(True), tile=128)
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    x = jax.ShapeDtypeStruct((2, length, 128), jnp.bfloat16)

    def attend(q, k, v, ids):
        rows = Rows(ids)
        return fused_attention(q, k, v, rows, rows, 64, Mask(True), layout=layout)

    (found,) = kernels.kernels(jax.make_jaxpr(attend)(x, x, x, ids).jaxpr)
    # Of 10 tiles that a causal mask leaves.
    assert found.visited == 9 / 10
    assert found.cycles(schedules.Schedule(100.0, 5.0, inner=80.0)) == 2 * (100 - 0.1 * 80) + 5


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["a100:1", "h100:1"])
def test_kernels_compile_for_gpus_without_one(topology):
    pytest.importorskip("jax_plugins.xla_cuda13")
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = started(__file__, topology, env=os.environ | environment | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [name for name in COMPILED if name != "sparse"]


def compile_for(topology):
    """Compiles forward and backward pass of COMPILED, and checks that they need no scratch."""
    from jax.sharding import SingleDeviceSharding

    plan = pytest.importorskip("trainer.annexes.planning.plan")
    sharding = SingleDeviceSharding(plan.target_of(topology).devices[0])

    for name, case in COMPILED.items():
        if case.pattern:
            continue

        def run(operands, rows, gradient, case=case):
            of = partial(attend, case, bias_of=whole_bias_of, block=None, interpret=False)
            _, pull = jax.vjp(lambda *operands: of(*operands, *rows), *operands)
            return pull(gradient)

        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(partial(example, case, 0)),
        )
        program = jax.jit(run).lower(*abstract).compile().as_text()
        assert program.count("__gpu$xla.gpu.triton") == (4 if case.biased else 3)
        assert f"[{B},{case.num_heads},{case.length},{case.source_length}]" not in program
        print(name, flush=True)


if __name__ == "__main__":
    compile_for(sys.argv[1])
