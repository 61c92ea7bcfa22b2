"""Compares the step times of Primer's variants, measured in turn in one process.

    python -m benchmarks.variants [--size=mini] [--presets=A,B,…] [--batch_size=8] [--length=128] \\
        [--rounds=7] [--output=FILE] [--field.path=value]

The step is the trainer's, on full rows of random tokens. In every round each variant makes one
step. "time" is the median over rounds of its time divided by that of the first variant in the same
round; "low" and "high" are the extremes. On a CPU, time is processor time of all cores together,
which other work on the machine does not lengthen; on an accelerator it is the clock's. "FLOPs" is
the ratio of `trainer.engine.cost.flops_per_step`, "XLA" that of the operations the compiler counts.

`--output` writes the minimum seconds of each variant by preset, for experiments.sweep
--step_times.
"""

import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax

from benchmarks.machine import machine
from benchmarks.step import make_batch
from tasks.terminal.command_line import Parser, positive, run
from tasks.terminal.table import table
from trainer.config.from_flags import build_config
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch

ARMS = (
    "transformer_vanilla,transformer_gelu,transformer_plusplus,transformer_squared_relu,"
    "transformer_mdha,primer_ez,primer,primer_as_released"
)
OTHERS = ",evolved_transformer,synthesizer,synthesizer_dense,switch_transformer,switch_primer"


def main(argv: list[str]) -> None:
    """Runs the command."""
    parser = Parser(
        prog="python -m benchmarks.variants",
        description=__doc__.splitlines()[0],
        epilog="Other flags are fields of the configuration, as in trainer.pretrain.",
    )
    add = parser.add_argument
    add("--size", default="mini", help="size of the default presets, as tiny, mini or small")
    add("--presets", help=f"presets, separated by commas; SIZE_ARM of {ARMS}{OTHERS} if left out")
    add("--batch_size", type=positive, default=8, help="rows per batch")
    add("--length", type=positive, default=128, help="tokens per row")
    add("--rounds", type=positive, default=7, help="steps of each variant")
    add("--output", help="JSON file to write, with the minimum seconds of a step by preset")
    arguments, overrides = parser.parse_known_args(argv)
    names = [f"{arguments.size}_{arm}" for arm in (ARMS + OTHERS).split(",")]
    if arguments.presets:
        names = arguments.presets.split(",")
    overrides.append(f"--batch_size={arguments.batch_size}")
    variants = {name: _Variant(name, overrides, arguments.length) for name in names}

    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(arguments.rounds):
        for name, variant in variants.items():
            samples[name].append(variant.seconds())
    first = names[0]
    device = jax.devices()[0]
    print(machine())
    print(f"{device.device_kind} ({device.platform}), {arguments.batch_size} x {arguments.length}")
    rows = []
    for name, variant in variants.items():
        ratios = [mine / its for mine, its in zip(samples[name], samples[first], strict=True)]
        columns = (
            *(statistics.median(ratios), min(ratios), max(ratios)),
            variant.flops / variants[first].flops,
            variant.operations / variants[first].operations,
        )
        milliseconds = min(samples[name]) * 1e3
        rows.append(
            (name, f"{variant.parameters:,}", f"{milliseconds:.1f}", *(f"{x:.3f}" for x in columns))
        )
    header = ("preset", "parameters", "ms", "time", "low", "high", "FLOPs", "XLA")
    print(table(header, rows))
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump({name: min(values) for name, values in samples.items()}, file, indent=1)


class _Variant:
    """The compiled training step of a preset, on one batch."""

    def __init__(self, preset: str, overrides: list[str], length: int) -> None:
        config, _ = build_config(preset, overrides)
        program = Program(SimpleNamespace(config=config))  # type: ignore[arg-type]
        self.parameters = parameter_count(config.model)
        self.flops = flops_per_step(config.model, config.batch_size, 0, length)
        self._state: Any = program.initial_state()
        self._batch = put_batch(make_batch(config, 0, length), program.mesh)
        self._step = program.train_step.lower(self._state, self._batch).compile()  # type: ignore
        self.operations = self._step.cost_analysis()["flops"]
        self.seconds()

    def seconds(self) -> float:
        """Runs one step and returns its seconds: processor time on a CPU, else by the clock."""
        clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
        started = clock()
        self._state = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return clock() - started


if __name__ == "__main__":
    run(main, sys.argv[1:])
