"""Measures how time and memory of block-sparse self-attention fall with its density.

    python -m benchmarks.sparse_attention [--length=4096] [--heads=2] [--head_dim=64] [--batch=1] \\
        [--mask=encoder] [--attention=auto] [--patterns=full,local:window=9 …] [--rounds=5] [--json]
    python -m benchmarks.sparse_attention --topology=v5e:2x2 --heads=8 [--bias]

Patterns are values of `--model.attention_pattern`, separated by blanks. Each is a sublayer of
attention, forward and backward, on full rows. "density" is the share of pairs of query and key that
it computes. On this machine the sublayers run in turn: "time" is the median over rounds of the
ratio to the first one in the same round, of processor time on a CPU; "temporary" is memory besides
arguments and results, by the compiler.

With --topology, libtpu compiles the bfloat16 sublayers for a TPU that is not there. "ms" is then
the compiler's estimate: cycles of XLA's fusions, and those of the kernels by their schedule.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

from tasks.terminal.command_line import Parser, positive, run
from tasks.terminal.table import table
from trainer.planning import devices
from trainer.planning.kernels import Schedules

_PATTERNS = (
    "full local:window=65 local:window=33 local:window=17 local:window=9 local "
    "bigbird:per_head=true fixed dilated"
)


class _Sublayer(NamedTuple):
    """A sublayer: its pattern, the share of pairs that it computes, and its traced gradients."""

    name: str
    density: float
    traced: Any


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(
        prog="python -m benchmarks.sparse_attention", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--topology", help="slice to compile for, as v5e:2x2; left out: run on this machine")
    add("--batch", type=positive, default=1, help="rows")
    add("--heads", type=positive, default=2, help="heads")
    add("--head_dim", type=positive, default=64, help="width of a head")
    add("--length", type=positive, default=4096, help="tokens of a row")
    add("--mask", choices=("encoder", "decoder"), default="encoder", help="what a query may see")
    add("--bias", action="store_true", help="T5's relative bias")
    add("--attention", choices=("auto", "einsum", "pallas"), default="auto",
        help="the implementation, as --model.attention")  # fmt: skip
    add("--patterns", default=_PATTERNS, help="patterns, separated by blanks")
    add("--rounds", type=positive, default=5, help="runs of each")
    add("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args(argv)
    results = _estimated(arguments) if arguments.topology else _measured(arguments)
    if arguments.json:
        print(json.dumps(results))
        return
    print(results["device"])
    rows = [
        (
            each["pattern"],
            f"{each['density']:.3f}",
            f"{each['ms']:,.2f}",
            f"{each['time']:.3f}",
            f"{each['temporary'] / 2**20:,.1f}",
            f"{each['temporary'] / max(results['rows'][0]['temporary'], 1):.3f}",
        )
        for each in results["rows"]
    ]
    print(table(("pattern", "density", "ms", "time", "temporary MiB", "memory"), rows))


def _sublayers(arguments: argparse.Namespace, sharding: Any, dtype: str) -> list[_Sublayer]:
    import jax
    import jax.numpy as jnp

    from trainer.engine.cost import self_pairs
    from trainer.model.config import ModelConfig
    from trainer.model.masks import Rows, predicate
    from trainer.model.mixers import View
    from trainer.model.positions import Positions
    from trainer.model.spec import model_spec

    batch, length, width = arguments.batch, arguments.length, arguments.heads * arguments.head_dim
    decoder = arguments.mask == "decoder"

    def of(name: str) -> _Sublayer:
        config = ModelConfig(
            family="t5_1_1",
            vocab_size=128,
            emb_dim=width,
            num_heads=arguments.heads,
            head_dim=arguments.head_dim,
            mlp_dim=width,
            num_encoder_layers=1,
            num_decoder_layers=1,
            dtype=dtype,
            position="relative" if arguments.bias else "none",
            attention_pattern=name,
            attention=arguments.attention,
        )
        spec = model_spec(config)
        stack = spec.stacks["decoder" if decoder else "encoder"]
        mixer = stack.layers[0].mixer.build(spec.shared, "attention")
        scheme = stack.position.build(spec.shared, arguments.heads, "position")

        def apply(params: Any, x_BLD: jax.Array) -> jax.Array:
            rows = Rows(jnp.ones((batch, length), jnp.int32))
            positions = Positions()
            if arguments.bias:
                positions = scheme.apply({"params": params["position"]}, length, length)
            view = View(stack.mask(rows, rows), positions, rows, rows, predicate(stack.mask))
            return mixer.apply({"params": params["attention"]}, x_BLD, x_BLD, view, True)

        def gradients(params: Any, x_BLD: jax.Array, gradient_BLD: jax.Array) -> Any:
            out_BLD, pull = jax.vjp(apply, params, x_BLD)
            return out_BLD, pull(gradient_BLD)

        def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        kernels = {
            name: {"kernel": array(width, width)} for name in ("query", "key", "value", "out")
        }
        params: dict[str, Any] = {"attention": kernels}
        if arguments.bias:
            params["position"] = {"rel_embedding": array(arguments.heads, 32)}
        x_BLD = array(batch, length, width, dtype=jnp.dtype(dtype))
        traced = jax.jit(gradients).trace(params, x_BLD, x_BLD)
        pairs = self_pairs(stack.layers[0].mixer, stack.mask, length)
        return _Sublayer(name, pairs / length**2, traced)

    return [of(name) for name in arguments.patterns.split()]


def _measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns times and memory on this machine."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.machine import machine

    device = jax.devices()[0]
    random = np.random.default_rng(0)
    clock = time.process_time if device.platform == "cpu" else time.perf_counter
    sublayers = _sublayers(arguments, None, "float32")
    compiled = [each.traced.lower().compile() for each in sublayers]
    seconds: list[list[float]] = [[] for _ in sublayers]
    values = [
        jax.tree.map(
            lambda x: jnp.asarray(random.normal(size=x.shape, scale=0.1), x.dtype),
            each.traced.in_avals[0],
        )
        for each in sublayers
    ]
    for turn in range(arguments.rounds + 1):
        for program, operands, times in zip(compiled, values, seconds, strict=True):
            started = clock()
            jax.block_until_ready(program(*operands))
            if turn:  # the first run warms up
                times.append(clock() - started)
    rows = []
    for each, program, times in zip(sublayers, compiled, seconds, strict=True):
        ratios = [mine / first for mine, first in zip(times, seconds[0], strict=True)]
        rows.append(
            {
                "pattern": each.name,
                "density": each.density,
                "ms": min(times) * 1e3,
                "time": statistics.median(ratios),
                "temporary": program.memory_analysis().temp_size_in_bytes,
            }
        )
    return {"device": f"{device.device_kind}: {machine()}", "rows": rows}


def _estimated(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the compiler's estimates for a TPU."""
    topology = devices.Topology.named(arguments.topology)
    devices.prepare_compiler()
    schedules = Schedules()
    import jax

    from trainer.planning import hlo
    from trainer.planning.devices import place_of
    from trainer.planning.kernels import kernels
    from trainer.planning.timing import timing

    # A program from the cache would come without the schedules of its kernels.
    jax.config.update("jax_enable_compilation_cache", False)
    device = topology.devices()[0]
    mesh = jax.sharding.Mesh([device], ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        sublayers = _sublayers(arguments, sharding, "bfloat16")
    places, rows = [place_of(device)], list[dict[str, Any]]()
    for each in sublayers:
        program = each.traced.lower().compile()
        module = hlo.parse(program.as_text())
        estimate = timing(
            module,
            topology.chip,
            places,
            kernels(each.traced.jaxpr.jaxpr),
            schedules.read(module),
            getattr(device, "num_cores", None) or 1,
        )
        schedules.clear()
        milliseconds = estimate.step * 1e3
        rows.append(
            {
                "pattern": each.name,
                "density": each.density,
                "ms": milliseconds,
                "time": milliseconds / (rows[0]["ms"] if rows else milliseconds),
                "temporary": program.memory_analysis().temp_size_in_bytes,
                "kernels": {kernel.name: kernel.cycles for kernel in estimate.kernels},
            }
        )
    return {"device": device.device_kind, "rows": rows}


if __name__ == "__main__":
    run(main, sys.argv[1:])
