"""Estimates a training step on a TPU slice without the slice, with layers scanned and unrolled.

    python -m benchmarks.tpu_step --preset=t5_1_1_base --topology=v5e:2x2 --batch_size=64 \\
        --inputs=512 --targets=114 [--steps=scanned,unrolled] [--depths=1,2] [--field.path=value]

libtpu (the extra `tpu`) compiles each step ahead of time, as in `trainer.plan`, which estimates
what a device holds and how long the parts take. Prints a row of Markdown for each step. Times are
the compiler's estimates and not a clock: compare with them.

Unrolled layers take the compiler minutes to hours. `--depths=1,2` compiles unrolled steps with 1
and 2 layers in each stack, and extrapolates the time and the memory of each part in a straight line
to all layers; such rows say so.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from tasks.terminal.command_line import Parser, UserError, positive, run
from trainer.config import Config
from trainer.config.from_flags import build_config
from trainer.plan import target_of
from trainer.planning import parts

if TYPE_CHECKING:
    from trainer.planning.compiled import Target
    from trainer.planning.planned_run import Subject

_STEPS = {"scanned": True, "unrolled": False}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated time and memory of a step.

    Attributes:
      seconds: by part of `trainer.planning.parts`.
      bytes: bytes of a device, by part of `trainer.planning.memory`.
      compile_seconds: time that the compiler took.
      depths: layers of the two steps that it extrapolates; () if the step itself was compiled.
      refused: the reason if there is no estimate.
    """

    seconds: dict[str, float]
    bytes: dict[str, float]
    compile_seconds: float = 0.0
    depths: tuple[int, ...] = ()
    refused: str = ""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def main(argv: list[str]) -> None:
    """Runs the command.

    Raises:
      UserError: a flag is wrong, or no step could be compiled.
    """
    arguments, overrides = _parser().parse_known_args(argv)
    config, origins = build_config(
        arguments.preset,
        [
            *(f"--batch_size={arguments.batch_size}", f"--model.dtype={arguments.dtype}"),
            *(f"--lengths.inputs={arguments.inputs}", f"--lengths.targets={arguments.targets}"),
            # As in pretraining; the presets' dropout is for fine-tuning.
            "--model.dropout_rate=0",
            *overrides,
        ],
    )
    names = _names(arguments.steps)
    depths = _depths(arguments.depths, config)
    target = target_of(arguments.topology)

    import jax

    from trainer.planning.planned_run import subject

    # A program from the cache would come without the schedules of its kernels.
    jax.config.update("jax_enable_compilation_cache", False)
    trained = subject(config, origins, len(target.devices))
    estimates = {}
    for name in names:
        scan = _STEPS[name]
        if depths and not scan:
            each = [_estimate(_with_layers(trained, depth), target, scan) for depth in depths]
            estimates[name] = extrapolated(*each, depths, _layers(config))
        else:
            estimates[name] = _estimate(trained, target, scan)
        print(f"{name}: {_progress(estimates[name])}", file=sys.stderr, flush=True)
    least = _least_seconds(trained, target)
    if arguments.json:
        print(json.dumps(_values(estimates, least), indent=1))
    else:
        print(markdown(estimates, least, target.memory))
    if all(each.refused for each in estimates.values()):
        raise UserError("no step could be compiled, see above")


def _estimate(trained: Subject, target: Target, scan: bool) -> Estimate:
    """Compiles a step, with its layers scanned or not."""
    from trainer.planning.compiled import compile_plan

    chosen = trained.with_values({"model.scan_layers": scan})
    try:
        plan = compile_plan(chosen, target, evaluation=False)
    except UserError as error:
        return Estimate({}, {}, refused=str(error))
    return Estimate(plan.train.timing.seconds, plan.train.memory.parts, plan.train.seconds)


def extrapolated(
    shallow: Estimate, deep: Estimate, depths: tuple[int, int], layers: int
) -> Estimate:
    """Returns the estimate of a step with more layers than two others, extrapolated part by part.

    Args:
      shallow: with `depths[0]` layers in each stack.
      deep: with `depths[1]`.
      depths: layers of the two.
      layers: of the result.
    """
    seconds = shallow.compile_seconds + deep.compile_seconds
    refused = shallow.refused or deep.refused
    if refused:
        return Estimate({}, {}, seconds, depths, refused)
    far = (layers - depths[0]) / (depths[1] - depths[0])

    def line(low: dict[str, float], high: dict[str, float]) -> dict[str, float]:
        names = [*low, *(name for name in high if name not in low)]
        ends = {name: (low.get(name, 0.0), high.get(name, 0.0)) for name in names}
        return {name: max(a + far * (b - a), 0.0) for name, (a, b) in ends.items()}

    times, sizes = line(shallow.seconds, deep.seconds), line(shallow.bytes, deep.bytes)
    return Estimate(times, sizes, seconds, depths)


def markdown(estimates: dict[str, Estimate], least: float, memory: int) -> str:
    """Returns a table of Markdown with a row for each step: ms by part, GB, MFU, ratio.

    The ratio is the time of a step divided by the fastest one's.

    Args:
      estimates: by name of the step.
      least: seconds of a step at the peak of the devices.
      memory: bytes that a step may use on a device.
    """
    found = [each.step for each in estimates.values() if not each.refused]
    header = ("step", "ms", "MFU", "HBM, GB", "of fastest", *parts.PARTS)
    lines = [header, ("---", *["---:"] * (len(header) - 1))]
    for name, each in estimates.items():
        if each.refused:
            lines.append((name, each.refused.replace("|", "/"), *[""] * (len(header) - 2)))
            continue
        label = f"{name}, from {' and '.join(map(str, each.depths))} layers"
        held = sum(each.bytes.values())
        lines.append(
            (
                label if each.depths else name,
                f"{each.step * 1e3:,.1f}",
                f"{least / each.step:.1%}",
                f"{held / 1e9:,.2f}" + ", does not fit" * (held > memory),
                f"{each.step / min(found):.2f}",
                *(f"{each.seconds.get(part, 0.0) * 1e3:,.1f}" for part in parts.PARTS),
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _values(estimates: dict[str, Estimate], least: float) -> dict[str, Any]:
    return {
        name: dataclasses.asdict(each) | {"step_seconds": each.step, "mfu": least / each.step}
        if not each.refused
        else {"refused": each.refused}
        for name, each in estimates.items()
    }


def _progress(estimate: Estimate) -> str:
    if estimate.refused:
        return estimate.refused
    return f"{estimate.step * 1e3:,.1f} ms a step, compiled in {estimate.compile_seconds:,.0f} s"


def _least_seconds(trained: Subject, target: Target) -> float:
    """Returns the seconds of a step at the peak of the devices."""
    from trainer.engine.cost import flops_per_step
    from trainer.engine.hardware import peak_flops

    config = trained.config
    flops = flops_per_step(config.model, config.batch_size, *trained.lengths)
    return flops / len(target.devices) / peak_flops(target.kind)


def _names(text: str | None) -> list[str]:
    """Returns the steps to compile; raises UserError if there is no such step."""
    names = text.split(",") if text else [*_STEPS]
    for name in names:
        if name not in _STEPS:
            raise UserError(f"--steps={text}: unknown step {name}; there are {', '.join(_STEPS)}")
    return names


def _depths(text: str | None, config: Config) -> tuple[int, int] | None:
    if not text:
        return None
    found = text.split(",")
    layers = _layers(config)
    if len(found) != 2 or not all(each.isdecimal() for each in found):
        raise UserError(f"--depths={text}: give two numbers of layers, such as 1,2")
    low, high = int(found[0]), int(found[1])
    if not 0 < low < high <= layers:
        raise UserError(f"--depths={text}: the numbers must rise, from 1 to at most {layers}")
    return low, high


def _layers(config: Config) -> int:
    """Returns the layers of each stack.

    Raises:
      UserError: the stacks have different numbers of layers.
    """
    stacks = {config.model.num_encoder_layers, config.model.num_decoder_layers} - {0}
    if len(stacks) != 1:
        raise UserError("--depths: encoder and decoder must have equally many layers")
    return stacks.pop()


def _with_layers(trained: Subject, layers: int) -> Subject:
    names = ("num_encoder_layers", "num_decoder_layers")
    model = trained.config.model
    return trained.with_values({f"model.{name}": layers for name in names if getattr(model, name)})


def _parser() -> Parser:
    parser = Parser(
        prog="python -m benchmarks.tpu_step",
        description=__doc__.splitlines()[0],
        epilog="Other flags are fields of the configuration, as in trainer.pretrain.",
    )
    add = parser.add_argument
    add("--preset", default="t5_1_1_small", help="model preset")
    add("--topology", default="v5e:2x2", help="a TPU slice, as in trainer.plan")
    add("--batch_size", type=positive, default=256, help="rows per batch, on all chips together")
    add("--inputs", type=int, default=512, help="length of the inputs in tokens")
    add("--targets", type=int, default=114, help="length of the targets in tokens")
    add("--dtype", default="bfloat16", help="dtype of the computation: float32 or bfloat16")
    add("--steps", help=f"steps, separated by commas: {', '.join(_STEPS)}")
    add("--depths", metavar="LOW,HIGH", help="layers of the unrolled steps to extrapolate from")
    add("--json", action="store_true", help="print JSON: seconds and bytes")
    return parser


if __name__ == "__main__":
    run(main, sys.argv[1:])
