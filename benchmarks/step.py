"""Measures the training step: time, tokens, MFU, memory, and its parts; compares it with T5X's.

    python -m benchmarks.step --preset=t5_1_1_small --batch_size=8 --inputs=512 --targets=114 \\
        --dtype=float32 [--rounds=5] [--steps=1] [--model.remat=dots] [--field.path=value] \\
        [--t5x=T5X_CHECKOUT[:AIRIO:JESTIMATOR]] [--t5x_python=VENV/bin/python]

It runs the trainer's step on full rows of random tokens. A sample is the time per step of
a round of `--steps` steps, dispatched one after the other as in a run; more steps hide more of the
dispatch overhead on an accelerator. Any field of the configuration is a flag: with
`--deterministic=false`, XLA may use kernels on GPUs whose results differ from run to run, so the
ratio to a run without it is the cost of reproducible bits. `--output` adds the minimum seconds of a
step to a file for `experiments.sweep --step_times`.

With `--t5x`, T5X's `Trainer` makes the same update (its T5 1.1 or decoder-only example, Adafactor,
the same shapes and dtypes) in a separate process whose interpreter has its dependencies,
alternating with ours round by round.

MFU is `cost.flops_per_step`, forward and backward without recomputation, divided by the time of a
step and by the peak: bfloat16's for hardware that `engine.hardware` lists, otherwise the speed of a
matrix product measured here. The roofline is the higher of two bounds: FLOPs at the peak, and the
step's bytes at the memory bandwidth. The part "no layers" is forward and backward of embedding,
logits and loss alone, which the first two contain. On a CPU, parts are processor seconds of all
cores together, which other work on the machine hardly changes.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import t5x
from benchmarks.machine import machine
from tasks.objectives import Lengths
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import at_least, field
from trainer.config import Config
from trainer.config.from_flags import build_config
from trainer.data.features import converter
from trainer.engine import determinism
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.hardware import peak_flops
from trainer.engine.loss import model_loss
from trainer.engine.program import Program
from trainer.engine.sharding import put_batch
from trainer.engine.step import make_gradients
from trainer.model.spec import model_spec
from trainer.model.transformer import build_model, init_params, run_model
from trainer.optim.optimizer import optimizer_of

# Memory bandwidth in bytes per second, by a part of JAX's `device_kind`. Sources: as in
# `trainer.engine.hardware`. A100 means the one with 80 GB.
_BANDWIDTH = {
    "TPU v4": 1.228e12,
    "TPU v5 lite": 0.819e12,
    "TPU v5": 2.765e12,
    "TPU v6 lite": 1.640e12,
    "A100": 2.039e12,
    "H100": 3.35e12,
    "H200": 4.8e12,
}
Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command and of the configuration."""

    preset: str = field("t5_1_1_small", "model preset")
    batch_size: int = field(8, "rows per batch", rule=at_least(1))
    inputs: int = field(512, "length of the inputs in tokens")
    targets: int = field(114, "length of the targets in tokens")
    dtype: str = field("float32", "dtype of the computation: float32 or bfloat16")
    rounds: int = field(5, "samples to take", rule=at_least(1))
    steps: int = field(1, "steps per round", rule=at_least(1))
    parts: bool = field(True, "measure forward, backward and optimizer separately too")
    output: str | None = field(
        None, "JSON file, preset -> seconds per step; adds this preset's minimum"
    )
    t5x: str | None = field(
        None, "T5X's source folders, separated by colons; without them, T5X is not measured"
    )
    t5x_python: str = field(sys.executable, "interpreter with T5X's dependencies")
    config: tuple[str, ...] = field(
        (), "fields of the configuration, as in trainer.pretrain", rest=lambda words, known: None
    )


def run(flags: Flags) -> None:
    """Measures the step and prints the report."""
    # As in pretraining; the presets' dropout is for fine-tuning.
    own = (f"--batch_size={flags.batch_size}", f"--model.dtype={flags.dtype}")
    config, _ = build_config(flags.preset, [*own, "--model.dropout_rate=0", *flags.config])
    determinism.set_flags(config.deterministic)
    # Compilation is measured, so no compiled program of an earlier run may be reused.
    jax.config.update("jax_enable_compilation_cache", False)
    features = converter(config.model, Lengths(flags.inputs, flags.targets))
    lengths = features.encoder_length, features.decoder_length

    steps: dict[str, Ours | T5X] = {"ours": (ours := Ours(config, *lengths))}
    if flags.t5x:
        steps["T5X"] = T5X(config, *lengths, flags.t5x, flags.t5x_python)
    samples: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(flags.rounds):
        for name, step in steps.items():
            wall, core = step.seconds(flags.steps)
            samples[name].append(wall / flags.steps)
            processor[name].append(core / flags.steps)

    times = processor if _on_cpu() else samples
    _show_ours(ours, lengths, samples["ours"], f"{flags.rounds} x {flags.steps} steps")
    if _on_cpu():
        show("processor", _statistics(processor["ours"]) + " per step, all cores together")
    if theirs := steps.get("T5X"):
        show("T5X", f"{_statistics(samples['T5X'])}; compiling {theirs.compile_seconds:.1f} s")
        show("T5X / ours", _ratios(samples))
        if _on_cpu():
            show("processor", f"{_statistics(processor['T5X'])}; T5X / ours {_ratios(processor)}")
        theirs.close()
    if flags.output:
        path = pathlib.Path(flags.output)
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, config.preset: min(times["ours"])}, indent=1))
    if flags.parts:
        for name, seconds in ours.parts(flags.rounds).items():
            show(name, f"{_time(seconds)}, {seconds / min(times['ours']):.0%} of a step")


def show(subject: str, text: str) -> None:
    """Prints a line of the report."""
    print(f"{subject:<12} {text}", flush=True)


def _show_ours(ours: "Ours", lengths: tuple[int, int], samples: list[float], rounds: str) -> None:
    """Prints our step's settings, its cost and what bounds it."""
    config, step = ours.config, statistics.median(samples)
    flops = flops_per_step(config.model, config.batch_size, *lengths)
    kind, devices = jax.devices()[0].device_kind, jax.device_count()
    peak, bandwidth, origin = _limits(config.model.dtype)
    moved, counted = ours.bytes_moved()
    by_compute, by_memory = flops / devices / peak, moved / devices / bandwidth
    bound = "compute" if by_compute > by_memory else "memory"
    scanned = ", layers scanned" if config.model.scan_layers else ""
    show(
        "model",
        f"{config.preset}: {parameter_count(config.model):,} parameters, {config.model.dtype}, "
        f"{config.batch_size} x {lengths}, {config.optimizer.name}, remat {config.model.remat}"
        f"{scanned}",
    )
    show("machine", machine())
    show("device", f"{devices} x {kind} ({jax.devices()[0].platform})")
    show("bits", determinism.promise())
    show("step", f"{_statistics(samples)}; {rounds}")
    positions = config.batch_size * sum(lengths)
    show("tokens", f"{positions / step:,.0f} positions/s of encoder and decoder")
    show("MFU", f"{flops / devices / step / peak:.1%} of {peak / 1e12:,.2f} TFLOP/s, {origin}")
    operations = f"{flops / 1e9:,.1f} GFLOP per step: 6 per kernel element and token, attention"
    show("operations", operations)
    show("roofline", f"compute {_time(by_compute)}, memory {_time(by_memory)}: bound by {bound}")
    show("bytes", f"{moved / 1e9:,.2f} GB per step, {counted}; {bandwidth / 1e9:,.0f} GB/s")
    show("memory", ours.memory())
    show("compiling", f"{ours.compile_seconds:.1f} s, including tracing")


class Ours:
    """The compiled training step on one batch."""

    def __init__(self, config: Config, inputs: int, targets: int) -> None:
        self.config = config
        # Program reads only the configuration of a run.
        program = Program(SimpleNamespace(config=config))
        self.state = program.initial_state()
        self.batch = put_batch(make_batch(config, inputs, targets), program.mesh)
        started = time.perf_counter()
        self.step = program.train_step.lower(self.state, self.batch).compile()
        self.compile_seconds = time.perf_counter() - started
        self.seconds(1)

    def seconds(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns (seconds of wall time, processor seconds of all cores)."""
        jax.block_until_ready(self.state)
        started, core = time.perf_counter(), time.process_time()
        for _ in range(steps):
            self.state = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return time.perf_counter() - started, time.process_time() - core

    def bytes_moved(self) -> tuple[float, str]:
        """Returns the bytes that a step reads and writes on all devices, and what was counted."""
        if self.config.model.scan_layers or self.config.microbatches > 1:
            # XLA counts the body of a loop only once, so this is a lower bound: parameters are read
            # in forward and backward, and updated; gradients are written and read; the optimizer's
            # state is read and written.
            sizes = [
                sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
                for tree in (self.state.params, self.state.opt_state)
            ]
            return 6.0 * sizes[0] + 2.0 * sizes[1], "parameters and optimizer only"
        analysis = self.step.cost_analysis()
        return analysis["bytes accessed"] * jax.device_count(), "read and written by XLA's kernels"

    def memory(self) -> str:
        """Returns a description of a device's peak memory."""
        plan = self.step.memory_analysis()
        planned = plan.argument_size_in_bytes + plan.output_size_in_bytes
        planned += plan.temp_size_in_bytes - plan.alias_size_in_bytes
        text = f"{planned / 1e9:.2f} GB planned by the compiler"
        seen = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return text + (f", {seen / 1e9:.2f} GB peak in use" if seen else "")

    def parts(self, rounds: int) -> dict[str, float]:
        """Returns the minimum seconds, over `rounds`, of the step's parts, compiled separately."""
        config, params, batch = self.config, self.state.params, self.batch
        spec = model_spec(config.model)
        model, key = build_model(spec), jax.random.key(0)
        of_batch = model_loss(model).of_batch
        clock = time.process_time if _on_cpu() else time.perf_counter
        least = partial(_least, rounds=rounds, clock=clock)
        # The model with only embedding and logits.
        stacks = {name: getattr(spec, name, None) for name in ("encoder", "decoder")}
        empty = dataclasses.replace(
            spec,
            **{name: dataclasses.replace(each, layers=()) for name, each in stacks.items() if each},
            shared=dataclasses.replace(spec.shared, scan_layers=False),
        )

        def loss(params: Any) -> jax.Array:
            return of_batch(run_model(model, params, batch), batch, config.loss)[0]

        forward = least(jax.jit(loss), (params,))
        gradient = jax.jit(make_gradients(model, config))
        both = least(gradient, (params, batch, key))
        gradients, _ = gradient(params, batch, key)
        optimizer = optimizer_of(config.optimizer, spec)

        @jax.jit
        def update(gradients: Any, state: Any, params: Any) -> Any:
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        updating = least(update, (gradients, self.state.opt_state, params))
        ends = jax.jit(make_gradients(build_model(empty), config))
        return {
            "forward": forward,
            "backward": both - forward,
            "optimizer": updating,
            "no layers": least(ends, (init_params(empty, key), batch, key)),
        }


class T5X:
    """T5X's training step in a separate process."""

    def __init__(
        self, config: Config, inputs: int, targets: int, sources: str, python: str
    ) -> None:
        sizes = t5x.sizes(config, inputs, targets)
        self._process = t5x.start("t5x_step", sizes, sources, python)
        self.compile_seconds, _ = self._answer()

    def seconds(self, steps: int) -> tuple[float, float]:
        """Runs `steps` steps; returns the same as `Ours.seconds`."""
        print(steps, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> tuple[float, float]:
        for line in self._process.stdout:
            if line.startswith("seconds "):
                _, wall, core = line.split()
                return float(wall), float(core)
        raise UserError("--t5x: T5X's process failed; see its output above")


def make_batch(config: Config, inputs: int, targets: int) -> Batch:
    """Returns full rows of random tokens under T5X's feature names, int32."""
    rows, random = config.batch_size, np.random.default_rng(0)

    def tokens(length: int) -> np.ndarray:
        return random.integers(1, config.model.vocab_size, (rows, length), np.int32)

    batch = {"encoder_input_tokens": tokens(inputs)} if inputs else {}
    side, length = ("decoder", targets) if targets else ("encoder", inputs)
    batch[f"{side}_target_tokens"] = tokens(length)
    batch[f"{side}_loss_weights"] = np.ones((rows, length), np.int32)
    if targets:
        shifted = np.roll(batch["decoder_target_tokens"], 1, axis=1)
        shifted[:, 0] = 0
        batch["decoder_input_tokens"] = shifted
    return batch


def _limits(dtype: str) -> tuple[float, float, str]:
    """Returns a device's FLOP/s, its memory's bytes/s, and the origin of the FLOP/s."""
    kind = jax.devices()[0].device_kind
    bandwidth = next((value for part, value in _BANDWIDTH.items() if part in kind), None)
    known = peak_flops(kind)
    if known and bandwidth:
        return known, bandwidth, "the data sheet's dense bfloat16"
    side = 2048
    matrix = jnp.ones((side, side), dtype)
    product = _least(jax.jit(jnp.matmul), (matrix, matrix), 10)
    array = jnp.ones(2**26, jnp.float32)
    copy = _least(jax.jit(lambda x: x + 1), (array,), 5)
    origin = f"measured: a product of two {dtype} matrices of {side}²"
    return 2 * side**3 / product, 2 * array.nbytes / copy, origin


def _least(
    function: Callable[..., Any],
    arguments: tuple,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the minimum seconds of a call, after a first call that compiles."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(rounds):
        started = clock()
        jax.block_until_ready(function(*arguments))
        times.append(clock() - started)
    return min(times)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _statistics(samples: list[float]) -> str:
    return f"median {_time(statistics.median(samples))}, minimum {_time(min(samples))}"


def _ratios(samples: dict[str, list[float]]) -> str:
    each = [b / a for a, b in zip(samples["ours"], samples["T5X"], strict=True)]
    return (
        f"{statistics.median(each):.2f} ({len(each)} rounds: {min(each):.2f} to {max(each):.2f}), "
        f"ratio of minima {min(samples['T5X']) / min(samples['ours']):.2f}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
