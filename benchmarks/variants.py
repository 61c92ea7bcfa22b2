"""Step time of Primer's variants as a ratio to the first, all measured in turn in one process.

    python -m benchmarks.variants [--size=mini] [--presets=A,B,…] [--batch_size=8] [--length=128] \\
        [--rounds=7] [--output=FILE] [--field.path=value]

The step is the trainer's own, on full rows of random tokens. In every round each variant makes one
step; a ratio is the median over rounds of the time by the baseline's in the same round. On a CPU
time is that of the processor, of all cores together, which other work on the machine does not
lengthen; on an accelerator it is the clock's. Beside it stands the ratio of FLOPs that
`trainer.engine.cost.flops_per_step` counts, and of operations that the compiler does.

`--output` writes the least seconds of each by preset, for experiments.primer --step_times.
"""

import argparse
import json
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import jax

from benchmarks.step import make_batch
from experiments.primer import ARMS
from tasks.terminal.command_line import run
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.pretrain import build_config

OTHERS = ",evolved_transformer,synthesizer,synthesizer_dense,switch_transformer,switch_primer"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.variants", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--size", default="mini")
    parser.add_argument("--presets", help=f"default: SIZE_ARM of {ARMS}{OTHERS}")
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output")
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
    print(f"{device.device_kind} ({device.platform}), {arguments.batch_size} x {arguments.length}")
    print(f"{'':28} {'parameters':>12} {'ms':>8} {'time':>6} {'low':>6} {'high':>6} {'FLOPs':>6}"
          f" {'XLA':>6}")  # fmt: skip
    for name, variant in variants.items():
        ratios = [mine / its for mine, its in zip(samples[name], samples[first], strict=True)]
        print(
            f"{name:28} {variant.parameters:>12,} {min(samples[name]) * 1e3:>8.1f} "
            f"{statistics.median(ratios):>6.3f} {min(ratios):>6.3f} {max(ratios):>6.3f} "
            f"{variant.flops / variants[first].flops:>6.3f} "
            f"{variant.operations / variants[first].operations:>6.3f}"
        )
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump({name: min(values) for name, values in samples.items()}, file, indent=1)


class _Variant:
    """The trainer's step of a preset, compiled, on one batch."""

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
        """Of one step: of the processor on a CPU, else by the clock."""
        clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
        started = clock()
        self._state = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return clock() - started


if __name__ == "__main__":
    run(main, sys.argv[1:])
