"""Estimates a step on a TPU slice without having the slice, with layers scanned and unrolled.

    python -m benchmarks.tpu_step --preset=t5_1_1_base --topology=v5e:2x2 --batch_size=64 \\
        --inputs=512 --targets=114 [--steps=scanned,unrolled,t5x] [--depths=1,2] \\
        [--t5x=T5X_CHECKOUT:AIRIO:JESTIMATOR] [--t5x_python=VENV/bin/python] [--field.path=value]

libtpu (the extra `tpu`) compiles each step ahead of time, as in `palimpsest plan`, which estimates
what a device holds and how long the parts take. Prints a row of Markdown for each step. Times are
the compiler's estimates, not measurements: use them only to compare.

Unrolled layers take the compiler minutes to hours. `--depths=1,2` compiles unrolled steps with 1
and 2 layers in each stack, and extrapolates each part's time and memory linearly to all layers;
such rows say so. The step `t5x` is T5X's (its example t5 or decoder_only), compiled and booked in
the same way in a process of its own; its interpreter needs T5X's dependencies and libtpu.
"""

import dataclasses
import json
import sys
from functools import partial
from typing import TYPE_CHECKING

from benchmarks import t5x
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import at_least, field
from trainer.annexes.planning import time_by_part
from trainer.annexes.planning.plan import target_of
from trainer.config import Config
from trainer.config.from_flags import build_config

if TYPE_CHECKING:
    from trainer.annexes.planning.compiled import Target
    from trainer.annexes.planning.planned_run import Subject

_T5X = "t5x"
_STEPS = {"scanned": True, "unrolled": False, _T5X: False}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of a step."""

    seconds: dict[str, float]  # by part of `trainer.annexes.planning.time_by_part`
    bytes: dict[str, float]  # bytes on a device, by part of `trainer.annexes.planning.memory`
    xla: float = 0.0  # seconds of the step by XLA's own estimates
    compile_seconds: float = 0.0  # time that the compiler took
    # Layers of the two steps extrapolated from; () if the step itself was compiled.
    depths: tuple[int, ...] = ()
    refused: str = ""  # the reason if there is no estimate

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    def __str__(self) -> str:
        if self.refused:
            return self.refused
        return f"{self.step * 1e3:,.1f} ms a step, compiled in {self.compile_seconds:,.0f} s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command and of the configuration."""

    preset: str = field("t5_1_1_small", "model preset")
    topology: str = field("v5e:2x2", "a TPU slice, as in palimpsest plan")
    batch_size: int = field(256, "rows per batch, on all chips together", rule=at_least(1))
    inputs: int = field(512, "length of the inputs in tokens")
    targets: int = field(114, "length of the targets in tokens")
    dtype: str = field("bfloat16", "dtype of the computation: float32 or bfloat16")
    steps: tuple[str, ...] = field(("scanned", "unrolled"), "steps to compile")
    t5x: str | None = field(
        None, "T5X's source folders, separated by colons, for the step t5x", metavar="FOLDERS"
    )
    t5x_python: str = field(sys.executable, "interpreter with T5X's dependencies and libtpu")
    t5x_submesh: tuple[int, ...] = field(
        (1, 1, 1, 1), "T5X's model_parallel_submesh", metavar="X,Y,Z,CORES"
    )
    depths: str | None = field(
        None, "numbers of layers from which to extrapolate unrolled steps", metavar="LOW,HIGH"
    )
    json: bool = field(False, "print JSON: seconds and bytes")
    config: tuple[str, ...] = field(
        (), "fields of the configuration, as in trainer.pretrain", rest=lambda words, known: None
    )


def run(flags: Flags) -> None:
    """Prints the estimates; raises UserError if a flag is wrong or no step could be compiled."""
    own = (
        *(f"--batch_size={flags.batch_size}", f"--model.dtype={flags.dtype}"),
        *(f"--lengths.inputs={flags.inputs}", f"--lengths.targets={flags.targets}"),
        "--model.dropout_rate=0",  # as in pretraining; the presets' dropout is for fine-tuning
    )
    config, origins = build_config(flags.preset, [*own, *flags.config])
    for name in flags.steps:
        if name not in _STEPS:
            raise UserError(
                f"--steps={','.join(flags.steps)}: unknown step {name}; the steps are "
                f"{', '.join(_STEPS)}"
            )
    if _T5X in flags.steps and not flags.t5x:
        raise UserError(f"--steps={','.join(flags.steps)}: {_T5X} needs --t5x")
    depths = _depths(flags.depths, config)
    target = target_of(flags.topology)

    import jax

    from trainer.annexes.planning.floor import floor
    from trainer.annexes.planning.planned_run import subject
    from trainer.engine.cost import flops_per_step
    from trainer.engine.hardware import peak_flops

    # A program from the cache would lack the schedules of its kernels.
    jax.config.update("jax_enable_compilation_cache", False)
    trained = subject(config, origins, len(target.devices))
    estimates = {}
    for name in flags.steps:
        scan = _STEPS[name]
        estimate = partial(_t5x, flags) if name == _T5X else partial(_estimate, target, scan)
        if depths and not scan:
            stacks = ("num_encoder_layers", "num_decoder_layers")
            sizes = [f"model.{name}" for name in stacks if getattr(config.model, name)]
            each = [estimate(trained.with_values(dict.fromkeys(sizes, depth))) for depth in depths]
            estimates[name] = extrapolated(*each, depths, _layers(config))
        else:
            estimates[name] = estimate(trained)
        print(f"{name}: {estimates[name]}", file=sys.stderr, flush=True)
    # Seconds of a step at the peak of the devices.
    least = flops_per_step(trained.config.model, trained.config.batch_size, *trained.lengths)
    least /= len(target.devices) * peak_flops(target.kind)
    lowest = floor(
        trained.config, trained.lengths, target.chip, len(target.devices), peak_flops(target.kind)
    )
    if flags.json:
        values = {
            name: {"refused": each.refused}
            if each.refused
            else {
                **dataclasses.asdict(each),
                **{"step_seconds": each.step, "mfu": least / each.step, "floor_seconds": lowest},
            }
            for name, each in estimates.items()
        }
        print(json.dumps(values, indent=1))
    else:
        print(markdown(estimates, least, lowest, target.memory))
    if all(each.refused for each in estimates.values()):
        raise UserError("no step could be compiled; see above")


def _estimate(target: "Target", scan: bool, trained: "Subject") -> Estimate:
    """Compiles a step, scanning its layers if `scan`, and returns its estimate."""
    from trainer.annexes.planning.compiled import compile_plan

    chosen = trained.with_values({"model.scan_layers": scan})
    try:
        plan = compile_plan(chosen, target, evaluation=False)
    except UserError as error:
        return Estimate({}, {}, refused=str(error))
    timing = plan.train.timing
    return Estimate(
        timing.seconds, plan.train.memory.parts, timing.estimated_step, plan.train.seconds
    )


def _t5x(flags: Flags, trained: "Subject") -> Estimate:
    """Compiles T5X's step in a process of its own, and returns its estimate."""
    argument = {"topology": flags.topology, "submesh": flags.t5x_submesh}
    argument |= t5x.sizes(trained.config, *trained.lengths)
    process = t5x.start("t5x_compile", argument, flags.t5x or "", flags.t5x_python)
    answer, _ = process.communicate()
    if process.returncode:
        raise UserError("--t5x: T5X's process failed; see its output above")
    return Estimate(**json.loads(answer.splitlines()[-1]))


def extrapolated(
    shallow: Estimate, deep: Estimate, depths: tuple[int, int], layers: int
) -> Estimate:
    """Extrapolates steps with `depths` layers in each stack to `layers`, part by part."""
    seconds = shallow.compile_seconds + deep.compile_seconds
    refused = shallow.refused or deep.refused
    if refused:
        return Estimate({}, {}, 0.0, seconds, depths, refused)
    far = (layers - depths[0]) / (depths[1] - depths[0])

    def line(low: dict[str, float], high: dict[str, float]) -> dict[str, float]:
        names = [*low, *(name for name in high if name not in low)]
        ends = {name: (low.get(name, 0.0), high.get(name, 0.0)) for name in names}
        return {name: max(a + far * (b - a), 0.0) for name, (a, b) in ends.items()}

    times, sizes = line(shallow.seconds, deep.seconds), line(shallow.bytes, deep.bytes)
    xla = shallow.xla + far * (deep.xla - shallow.xla)
    return Estimate(times, sizes, xla, seconds, depths)


def markdown(estimates: dict[str, Estimate], least: float, lowest: float, memory: int) -> str:
    """Returns a table of Markdown with a row for each step: ms by part, GB and MFU.

    `least` and `lowest` are seconds: a step's products at the devices' peak, and its floor.
    `memory` is the bytes that a step may use.
    """
    header = ("step", "ms", "of floor", "XLA's estimate", "MFU", "HBM, GB", *time_by_part.PARTS)
    lines = [header, ("---", *["---:"] * (len(header) - 1))]
    for name, each in estimates.items():
        if each.refused:
            lines.append((name, each.refused.replace("|", "/"), *[""] * (len(header) - 2)))
            continue
        label = f"{name}, from {' and '.join(map(str, each.depths))} layers"
        held = sum(each.bytes.values())
        fits = "" if held <= memory else ", does not fit"
        cells = (
            f"{each.step * 1e3:,.1f}",
            f"{each.step / lowest:.2f}",
            f"{each.xla * 1e3:,.1f}" if each.xla else "-",
            f"{least / each.step:.1%}",
            f"{held / 1e9:,.2f}{fits}",
        )
        of_parts = (f"{each.seconds.get(part, 0.0) * 1e3:,.1f}" for part in time_by_part.PARTS)
        lines.append((label if each.depths else name, *cells, *of_parts))
    lines.append(("floor", f"{lowest * 1e3:,.1f}", "1.00", *[""] * (len(header) - 3)))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _depths(text: str | None, config: Config) -> tuple[int, int] | None:
    if not text:
        return None
    found = text.split(",")
    layers = _layers(config)
    if len(found) != 2 or not all(each.isdecimal() for each in found):
        raise UserError(f"--depths={text}: give two numbers of layers, such as 1,2")
    low, high = int(found[0]), int(found[1])
    if not 0 < low < high <= layers:
        raise UserError(f"--depths={text}: the numbers must rise and be between 1 and {layers}")
    return low, high


def _layers(config: Config) -> int:
    """Returns the number of layers of each stack, which must be equal."""
    stacks = {config.model.num_encoder_layers, config.model.num_decoder_layers} - {0}
    if len(stacks) != 1:
        raise UserError("--depths: encoder and decoder must have the same number of layers")
    return stacks.pop()


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
