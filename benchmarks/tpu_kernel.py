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
import json
import sys
from typing import Any

from tasks.terminal.command_line import Parser, positive, run
from tasks.terminal.table import table
from trainer.planning import devices
from trainer.planning.kernels import Schedules, kernel_of, kernels

_MASKS = ("encoder", "decoder", "prefix")


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
    topology = devices.Topology.named(arguments.topology)
    devices.prepare_compiler()
    results = _compiled(arguments, topology, Schedules())
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


def _compiled(
    arguments: argparse.Namespace, topology: devices.Topology, schedules: Schedules
) -> dict[str, Any]:
    """Returns the kernels with their cycles and times in ms."""
    import jax
    import jax.numpy as jnp

    from trainer.engine.hardware import peak_flops
    from trainer.model.device import Device
    from trainer.model.fused_attention import fused_attention
    from trainer.model.masks import Predicate, Rows
    from trainer.model.positions import RelativeBias, T5RelativePosition
    from trainer.planning import hlo

    # A program from the cache would come without the schedules of its kernels.
    jax.config.update("jax_enable_compilation_cache", False)
    device = topology.devices()[0]
    chip, kind = topology.chip, device.device_kind
    sharding = jax.sharding.SingleDeviceSharding(device)
    batch, heads, head_dim = arguments.batch, arguments.heads, arguments.head_dim
    length, source_length = arguments.length, arguments.source_length or arguments.length
    mask = arguments.mask
    scale = 1.0 if arguments.bias else head_dim**-0.5

    def of_shape(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

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
                vmem_bytes=Device(kind).kernel_bytes,
            )

        return jax.vjp(attend, q, k, v, table_HR)[1](gradient)

    width = heads * head_dim
    query, key = of_shape(batch, length, width), of_shape(batch, source_length, width)
    ids = [of_shape(batch, n, dtype=jnp.int32) for n in (length, source_length)]
    table_HR = of_shape(heads, 32, dtype=jnp.float32)
    traced = jax.jit(gradients).trace(query, key, key, table_HR, *ids, query)
    module = hlo.parse(traced.lower().compile().as_text())
    known, known_schedules = kernels(traced.jaxpr.jaxpr), schedules.read(module)

    flops = (
        2 * batch * heads * length * source_length * head_dim * (0.5 if mask == "decoder" else 1)
    )
    results = []
    for call in module.computations[module.entry]:
        kernel, schedule = kernel_of(call, known), known_schedules.get(call.name)
        if kernel is None or schedule is None:
            continue
        products = (2 if kernel.name.endswith("forward") else 4) * flops
        cycles = kernel.cycles(schedule, getattr(device, "num_cores", None) or 1)
        results.append(
            {
                "name": kernel.name,
                "grid": kernel.grid,
                "step": schedule.step,
                "once": schedule.once,
                "cycles": cycles,
                "ms": cycles / chip.clock * 1e3,
                "memory_ms": kernel.bytes / chip.memory_bandwidth * 1e3,
                "products_ms": products / (peak_flops(kind) or 1) * 1e3,
            }
        )
    return {"kind": kind, "kernels": results}


if __name__ == "__main__":
    run(main, sys.argv[1:])
