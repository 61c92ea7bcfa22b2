"""Estimates the time of fused attention on a TPU that is not there, forward and backward.

    python -m benchmarks.tpu_kernel --topology=v5e:2x2 --batch=64 --heads=6 --length=512 \\
        [--source_length=512] [--head_dim=64] [--mask=encoder] [--no-bias] [--json]

libtpu (the extra `tpu`) compiles the bfloat16 kernels and dumps their schedules. Cycles are bundles
of a grid step times the steps of the grid, and those that run once for a group of heads. Waiting
for memory, and the 0.35 us that a grid step takes besides its work, are not in them; the time of
the bytes moved is beside them. "products" is the time of the matrix products at the chip's peak,
without those that the backward pass repeats.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from tasks.terminal.command_line import Parser, UserError, positive, run
from tasks.terminal.table import table

_MASKS = ("encoder", "decoder", "prefix")
# In a child process: the folder of the compiler's dumps.
_FOLDER = "PALIMPSEST_KERNEL_DUMPS"

# Clock in Hz and bytes per second of memory, by JAX's `device_kind`. Clocks are peak operations
# divided by those of the matrix units in a cycle. Sources: those of `trainer.engine.hardware`.
_CLOCK_AND_BANDWIDTH = {
    "TPU v4": (1.05e9, 1.228e12),
    "TPU v5 lite": (1.5e9, 0.819e12),
    "TPU v5": (1.75e9, 2.765e12),
    "TPU v6 lite": (1.75e9, 1.640e12),
}


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(prog="python -m benchmarks.tpu_kernel", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--topology", default="v5e:2x2", help="slice to compile for, as libtpu names it")
    add("--batch", type=positive, default=64, help="rows on a chip")
    add("--heads", type=positive, default=6, help="heads on a chip")
    add("--length", type=positive, default=512, help="queries of a row")
    add("--source_length", type=positive, help="keys of a row; as many as queries if left out")
    add("--head_dim", type=positive, default=64, help="width of a head")
    add("--mask", choices=_MASKS, default="encoder", help="what a query may see")
    add("--bias", action=argparse.BooleanOptionalAction, default=True,
        help="T5's relative bias, with its gradient")  # fmt: skip
    add("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args(argv)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu is not installed: pip install '.[tpu]'")
    if _FOLDER in os.environ:
        print(json.dumps(_compiled(arguments, os.environ[_FOLDER])))
        return
    results = _in_child(argv)
    if arguments.json:
        print(json.dumps(results))
        return
    names = ("step", "once", "cycles", "ms", "memory_ms", "products_ms")
    rows = []
    for kernel in results["kernels"]:
        grid = " x ".join(map(str, kernel["grid"]))
        rows.append([kernel["name"], grid, *(_number(kernel[name]) for name in names)])
    total = [sum(kernel[name] for kernel in results["kernels"]) for name in names[2:]]
    rows.append(["both", "", "", "", *map(_number, total)])
    header = ("kernel", "grid", "bundles", "once", "cycles", "ms", "memory ms", "products ms")
    print(results["kind"])
    print(table(header, rows))


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3f}"


def _in_child(argv: list[str]) -> dict[str, Any]:
    # libtpu reads its flags when it is loaded.
    from trainer.engine.kernel_schedule import dump_flags

    with tempfile.TemporaryDirectory() as folder:
        environment = {
            _FOLDER: folder,
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump_flags(folder)}",
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.tpu_kernel", *argv],
            env=os.environ | environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise UserError(f"the compiler failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _compiled(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Returns the kernels with their cycles and times in ms."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from trainer.engine.hardware import peak_flops
    from trainer.engine.kernel_schedule import compiled_schedule, kernels
    from trainer.model.attention import kernel_memory
    from trainer.model.fused_attention import fused_attention
    from trainer.model.masks import Predicate, Rows
    from trainer.model.positions import RelativeBias, T5RelativePosition

    jax.config.update("jax_enable_compilation_cache", False)
    topology = topologies.get_topology_desc(topology_name=arguments.topology, platform="tpu")
    device = topology.devices[0]
    kind = device.device_kind
    batch, heads, head_dim = arguments.batch, arguments.heads, arguments.head_dim
    length, source_length = arguments.length, arguments.source_length or arguments.length
    mask = arguments.mask
    scale = 1.0 if arguments.bias else head_dim**-0.5

    def of_shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def gradients(q, k, v, table_HR, query_ids, key_ids, gradient):
        def attend(q, k, v, table_HR):
            prefixed = mask == "prefix"
            return fused_attention(
                q,
                k,
                v,
                Rows(query_ids, query_ids if prefixed else None),
                Rows(key_ids, key_ids if prefixed else None),
                head_dim,
                Predicate(mask != "encoder", prefixed),
                RelativeBias(table_HR, T5RelativePosition(mask == "encoder"))
                if arguments.bias
                else None,
                scale,
                vmem_bytes=kernel_memory(kind),
            )

        return jax.vjp(attend, q, k, v, table_HR)[1](gradient)

    width = heads * head_dim
    query, key = of_shape(batch, length, width), of_shape(batch, source_length, width)
    ids = [of_shape(batch, n, dtype=jnp.int32) for n in (length, source_length)]
    table_HR = of_shape(heads, 32, dtype=jnp.float32)
    jaxpr = jax.make_jaxpr(gradients)(query, key, key, table_HR, *ids, query)

    clock, bandwidth = _CLOCK_AND_BANDWIDTH[kind]
    flops = (
        2 * batch * heads * length * source_length * head_dim * (0.5 if mask == "decoder" else 1)
    )
    results = []
    for kernel in kernels(jaxpr.jaxpr):
        schedule = compiled_schedule(kernel, device, folder)
        products = (2 if kernel.name.endswith("forward") else 4) * flops
        # Two cores share the groups of heads.
        cores = getattr(device, "num_cores", 1) or 1
        groups = -(-kernel.grid[0] // cores)
        cycles = schedule.cycles(groups, kernel.grid[1])
        results.append(
            {
                "name": kernel.name,
                "grid": kernel.grid,
                "step": schedule.step,
                "once": schedule.once,
                "cycles": cycles,
                "ms": cycles / clock * 1e3,
                "memory_ms": kernel.bytes / bandwidth * 1e3,
                "products_ms": products / (peak_flops(kind) or 1) * 1e3,
            }
        )
    return {"kind": kind, "kernels": results}


if __name__ == "__main__":
    run(main, sys.argv[1:])
