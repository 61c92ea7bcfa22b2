"""Compiles a run's programs ahead of time and reads how much memory and time they need."""

import dataclasses
import functools
import re
import time
from types import MappingProxyType
from typing import Any, cast

import jax

from tasks.terminal.command_line import UserError
from trainer.annexes.planning import hlo
from trainer.annexes.planning.devices import Chip, chip_of, place_of
from trainer.annexes.planning.floor import floor
from trainer.annexes.planning.gpus import Gpu, gpu_of
from trainer.annexes.planning.kernels import kernels
from trainer.annexes.planning.memory import BATCH, OPTIMIZER_STATE, PARAMETERS, Memory, memory
from trainer.annexes.planning.planned_run import Subject
from trainer.annexes.planning.schedules import Scheduled, Schedules
from trainer.annexes.planning.timing import Optimized, Timing
from trainer.config.mesh import AXES
from trainer.data.run import Run
from trainer.engine.compiled_programs import check_options
from trainer.engine.cost import flops_per_step, parameter_count
from trainer.engine.hardware import peak_flops
from trainer.engine.program import Program
from trainer.engine.sharding import host_part, rows


@dataclasses.dataclass(frozen=True)
class Target:
    """The devices of a plan, on all hosts.

    `name` is the topology, such as "v5e:4x4", or the platform of local devices; `memory` is how
    many bytes a program may use on a device. None means unknown or, for `schedules`, no schedules.
    """

    name: str
    devices: list[Any]
    hosts: int
    chip: Chip | Gpu | None
    memory: int | None
    schedules: Schedules | None = None

    @property
    def kind(self) -> str:
        """JAX's `device_kind`."""
        return self.devices[0].device_kind


def local_target() -> Target:
    """Returns the devices of this machine."""
    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    chip = chip_of(devices[0].device_kind) or gpu_of(devices[0].device_kind)
    limit = stats.get("bytes_limit") or (chip.memory if chip else None)
    return Target(devices[0].platform, devices, jax.process_count(), chip, limit)


# As in "the total memory required for HLO temporaries (61.88G) exceeds available HBM (15.75G)".
_OUT_OF_MEMORY = re.compile(r"memory required \D*\(([0-9.]+)([KMGT])\) exceeds available HBM")
_UNITS = MappingProxyType({"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40})


class TooLarge(UserError):
    """The compiler refuses a program: its temporaries alone need `needed` bytes per device.

    `training` is the plan without evaluation, if only the evaluation step is refused.
    """

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed
        self.training: Plan | None = None


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program; `timing` is None where the backend estimates no time.

    `optimized` can be timed again at other rates.
    """

    memory: Memory
    timing: Timing | None
    seconds: float
    optimized: Optimized | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The memory and time that a run needs on its target.

    A host reads `host_rows` rows of each batch; `flops` is a step's total over all devices, and
    `flops_halved` counts half of causal attention; `evaluation` includes the optimizer state and
    is None if the run never evaluates.
    """

    subject: Subject
    target: Target
    mesh: dict[str, int]
    host_rows: int
    parameters: int
    flops: int
    flops_halved: int
    train: Compiled
    evaluation: Compiled | None

    @property
    def needed(self) -> int:
        """Bytes of memory that a device must have."""
        both = (self.train, self.evaluation) if self.evaluation else (self.train,)
        return max(each.memory.total for each in both)

    @property
    def missing(self) -> int:
        """Bytes missing on a device; 0 if the run fits or the limit is unknown."""
        return self._lacking(self.needed)

    @property
    def trains(self) -> bool:
        """True if the training step fits or the limit is unknown."""
        return not self._lacking(self.train.memory.total)

    def _lacking(self, needed: int) -> int:
        return max(needed - self.target.memory, 0) if self.target.memory else 0

    @property
    def step(self) -> float | None:
        """Estimated seconds of a step; None if unknown."""
        return self.train.timing.step if self.train.timing else None

    @functools.cached_property
    def expected(self) -> tuple[float, float] | None:
        """Seconds of a step between which a measurement is expected; None if unknown.

        They are unknown on devices for which no calibration is known.
        """
        chip, optimized = self.target.chip, self.train.optimized
        if not chip or not optimized or not chip.calibration.rows:
            return None
        step, found = optimized.timing(chip, chip.rates).step, chip.calibration
        return step * found.least, step * found.largest

    @property
    def least(self) -> float | None:
        """Seconds of a step at the devices' peak; None if the peak is unknown."""
        peak = peak_flops(self.target.kind)
        return self.flops / len(self.target.devices) / peak if peak else None

    @property
    def mfu(self) -> float | None:
        """Estimated model FLOPs utilisation; None if unknown."""
        return self.least / self.step if self.least and self.step else None

    @property
    def mfu_halved(self) -> float | None:
        """The same with half of causal attention's pairs; None if unknown."""
        return self.mfu * self.flops_halved / self.flops if self.mfu else None

    @property
    def floor(self) -> float | None:
        """The least seconds that a step can take on these devices; None if unknown."""
        chip, peak, config = self.target.chip, peak_flops(self.target.kind), self.subject.config
        if not chip or not peak:
            return None
        return floor(config, self.subject.lengths, chip, len(self.target.devices), peak)

    @property
    def tokens_per_second(self) -> float | None:
        """Estimated encoder and decoder positions per second and device; None if unknown."""
        positions = self.subject.rows * sum(self.subject.lengths)
        return positions / self.step / len(self.target.devices) if self.step else None


def compile_plan(subject: Subject, target: Target, evaluation: bool = True) -> Plan:
    """Compiles the programs of a run and returns its plan; may raise TooLarge."""
    config = subject.config
    program = make_program(subject, target)
    check_options(program.mesh, config.compiler_options)
    state = program.abstract_state()
    batch = _batch(subject, program, subject.rows)
    held = {
        PARAMETERS: state.params,
        OPTIMIZER_STATE: state.opt_state,
        BATCH: (batch, state.step, state.metrics, state.guard),
    }
    vocab_size = config.model.vocab_size
    train = _compiled(program, target, program.train_step, (state, batch), held, vocab_size)
    part = host_part(program.mesh, target.devices[0].process_index)
    plan = Plan(
        subject,
        target,
        {axis: program.mesh.shape[axis] for axis in AXES},
        subject.rows // part.hosts,
        parameter_count(config.model),
        flops_per_step(config.model, subject.rows, *subject.lengths),
        flops_per_step(config.model, subject.rows, *subject.lengths, halve_causal=True),
        train,
        None,
    )
    return with_evaluation(plan) if evaluation else plan


def with_evaluation(plan: Plan) -> Plan:
    """Returns the plan with its evaluation step compiled, if it has one; may raise TooLarge."""
    config, target = plan.subject.config, plan.target
    if not config.evaluation.every_steps:
        return plan
    program = make_program(plan.subject, target)
    params = program.abstract_state().params
    size = config.evaluation.batch_size or config.batch_size
    batch = _batch(plan.subject, program, size)
    held = {PARAMETERS: params, BATCH: batch}
    step, vocab_size = program.evaluation_step, config.model.vocab_size
    try:
        evaluated = _compiled(program, target, step, (params, batch), held, vocab_size)
    except TooLarge as error:
        raised = TooLarge(f"an evaluation of {size:,} rows needs {error}", error.needed)
        raised.training = plan
        raise raised from error
    # The rest of the state stays on the device.
    kept = plan.train.memory.parts.get(OPTIMIZER_STATE, 0)
    with_state = Memory({**evaluated.memory.parts, OPTIMIZER_STATE: kept})
    return dataclasses.replace(plan, evaluation=dataclasses.replace(evaluated, memory=with_state))


def module_of(compiled: Any, target: Target) -> hlo.Module:
    """Returns the program compiled last.

    Where jaxlib is older than libtpu and cannot read it, the text is libtpu's own, which has the
    same operations without XLA's estimates.
    """
    try:
        return hlo.parse(compiled.as_text())
    except jax.errors.JaxRuntimeError:
        if text := target.schedules and target.schedules.program():
            return hlo.parse(text)
        raise


def _batch(subject: Subject, program: Program, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    sharding = rows(program.mesh)
    return {
        name: jax.ShapeDtypeStruct((size, *array.shape[1:]), array.dtype, sharding=sharding)
        for name, array in subject.row().items()
    }


def make_program(subject: Subject, target: Target) -> Program:
    """Returns a run's uncompiled program; raises UserError if it does not fit the devices."""
    # A Program reads only the configuration.
    return Program(cast(Run, subject), target.devices)


def _compiled(
    program: Program,
    target: Target,
    step: Any,
    arguments: tuple[Any, ...],
    held: dict[str, Any],
    vocab_size: int,
) -> Compiled:
    begin = time.monotonic()
    if target.schedules:
        target.schedules.clear()
    try:
        traced = step.trace(*arguments)
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        first = str(error).strip().splitlines()[0]
        needed = _OUT_OF_MEMORY.search(first)
        if needed:
            size = int(float(needed[1]) * _UNITS[needed[2]])
            raise TooLarge(
                f"{size / 1e9:,.1f} GB a device for activations and gradients alone", size
            ) from error
        raise UserError(f"the compiler for {target.name} gives up: {first}") from error
    module = module_of(compiled, target)
    times = optimized = None
    if target.chip:
        places = [place_of(device) for device in program.mesh.devices.flat]
        cores = getattr(target.devices[0], "num_cores", None) or 1
        scheduled = target.schedules.read(module) if target.schedules else Scheduled()
        found = kernels(traced.jaxpr.jaxpr)
        optimized = Optimized(module, places, found, scheduled, cores)
        times = optimized.timing(target.chip)
    held_by = memory(compiled, module, held, vocab_size)
    return Compiled(held_by, times, time.monotonic() - begin, optimized)
