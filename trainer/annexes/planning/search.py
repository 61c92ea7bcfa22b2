"""Tries ways to run a model on its devices: meshes, microbatches, remat, scans, compilers."""

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import as_flag
from trainer.annexes.planning import compiled
from trainer.annexes.planning.compiled import Plan, Target, TooLarge
from trainer.annexes.planning.memory import OPTIMIZER_STATE, PARAMETERS
from trainer.annexes.planning.planned_run import Subject
from trainer.config import field_paths
from trainer.config.mesh import check_dimensions

# With more devices along "tensor", communication exceeds computation.
_MOST_TENSOR = 8
_MICROBATCHES = (2, 4, 8, 16)
# Largest share of memory for the state; a larger one leaves too little for activations.
_STATE_SHARE = 0.6
_EVALUATED = "evaluation.batch_size"
_COMPILER = "compiler_options"
_PATHS = (
    *("mesh.data", "mesh.fsdp", "mesh.tensor", "microbatches", "model.remat"),
    *(_EVALUATED, _COMPILER),
)
_SCAN = "model.scan_layers"
# Options of the compiler that the best attempt is compiled with, each group in turn, by platform.
# Source: MaxText, `benchmarks/xla_flags_library.py`, and JAX's page of GPU performance tips.
_ON_SPARSE_CORES = tuple(
    f"xla_tpu_enable_sparse_core_collective_offload_{kind}=true"
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
)
_OPTIONS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "tpu": (_ON_SPARSE_CORES, ("xla_tpu_scoped_vmem_limit_kib=65536",)),
    "gpu": (("xla_gpu_enable_latency_hiding_scheduler=true",),),
}

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A tried configuration: its changed values by field path, and its plan or refusal."""

    values: Mapping[str, Any]
    plan: Plan | None
    refused: UserError | None = None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sort key: first the attempts that fit, by time; then the others, by memory."""
        if self.plan is None:
            size = self.refused.needed if isinstance(self.refused, TooLarge) else 0
            return (True, not size, size)
        if self.plan.missing:
            return (False, True, self.plan.missing)
        return (False, False, self.plan.step or 0.0)


def search(asked: Subject, target: Target, most: int) -> list[Attempt]:
    """Compiles up to `most` configurations and the best's evaluation; returns the best first.

    Of these, the last vary the best one: its layers unrolled, and with options of the compiler.
    """
    attempts: list[Attempt] = []
    divided, varied = _attempts(asked, target), _variants(asked, target, attempts)
    options = _OPTIONS.get(target.devices[0].platform, ())
    first = max(most - 1 - len(options), (most + 1) // 2)
    every = itertools.chain(itertools.islice(divided, first), varied, divided)
    for attempt in itertools.islice(every, most):  # the next one would be compiled
        attempts.append(attempt)
        _report(attempt)
    attempts.sort(key=lambda each: each.rank)
    if not attempts or attempts[0].plan is None or attempts[0].plan.missing:
        return attempts
    best, *others = attempts
    assert best.plan is not None
    plan = evaluated(best.plan)
    before, after = (each.subject.config.evaluation.batch_size for each in (best.plan, plan))
    values = best.values if before == after else {**best.values, _EVALUATED: after}
    return [Attempt(values, plan), *others]


def evaluated(plan: Plan) -> Plan:
    """Returns the plan with an evaluation that fits, with fewer rows if necessary."""
    config = plan.subject.config
    size = config.evaluation.batch_size or config.batch_size
    devices = plan.mesh["data"] * plan.mesh["fsdp"]
    while True:
        try:
            found = compiled.with_evaluation(plan)
            if not found.missing or size <= devices:
                return found
        except TooLarge:
            if size <= devices:  # nothing smaller is left to try
                raise
        size = max(size // 4 // devices, 1) * devices
        subject = plan.subject.with_values({_EVALUATED: size})
        plan = dataclasses.replace(plan, subject=subject)


def first_that_fits(
    asked: Subject, target: Target, known: Plan | TooLarge, most: int
) -> tuple[Plan | None, int]:
    """Returns the first plan that fits, or None, and the number tried; `known` is for `asked`."""
    training = known.training if isinstance(known, TooLarge) else known
    if training and training.trains:
        return evaluated(dataclasses.replace(training, evaluation=None)), 1
    tried = 0
    for attempt in itertools.islice(_attempts(asked, target, known), most):
        _report(attempt)
        tried += 1
        if attempt.plan and not attempt.plan.missing:
            return evaluated(attempt.plan), tried
    return None, tried


def flags(plan: Plan, asked: Subject | None = None) -> str:
    """Returns the flags that a search may set; with `asked`, only those that differ from it."""
    config = plan.subject.config
    values = dict(field_paths.leaves(config)) | {
        f"mesh.{axis}": size for axis, size in plan.mesh.items()
    }
    before = dict(field_paths.leaves(asked.config)) if asked else {}
    if asked and before["mesh.data"] == -1:
        # -1 means all remaining devices.
        before["mesh.data"] = values["mesh.data"] = -1
    return as_flags(
        {
            path: values[path]
            for path in (*_PATHS, _SCAN)
            if before.get(path) != values[path] is not None
        }
    )


def as_flags(values: Mapping[str, Any]) -> str:
    """Formats values by field path as flags."""
    return " ".join(f"--{path}={as_flag(value)}" for path, value in values.items())


def _report(attempt: Attempt) -> None:
    outcome = str(attempt.refused)
    if plan := attempt.plan:
        fit = f"{plan.missing / 1e9:,.1f} GB too much" if plan.missing else "fits"
        time = f", {plan.step * 1e3:,.1f} ms a step" if plan.step else ""
        outcome = f"{plan.needed / 1e9:,.1f} GB, {fit}{time}"
    print(f"tried {as_flags(attempt.values) or 'as asked'}: {outcome}", file=sys.stderr, flush=True)


def _attempts(
    asked: Subject, target: Target, known: Plan | TooLarge | None = None
) -> Iterator[Attempt]:
    """Yields attempts, the likeliest first; `known` is the outcome of `asked`, if compiled."""
    scanned = False
    with contextlib.suppress(UserError):
        asked.with_values({_SCAN: True})
        scanned = True
    base: Values = {_SCAN: True} if scanned and not asked.config.model.scan_layers else {}
    for mesh in _meshes(asked, target):
        found = False
        least: Attempt | None = None
        for values in _ways(asked, mesh):
            parts = values.get("microbatches")
            # Microbatches cost time: try them only if nothing cheaper fits.
            hopeless = parts and least and _in_parts(least, asked, parts) > (target.memory or 0)
            if parts and (found or hopeless):
                continue
            attempt = _attempt(asked, target, {**mesh, **base, **values}, known)
            if attempt is None:
                continue
            yield attempt
            if values["model.remat"] == "dots" and not parts:
                least = attempt
            if attempt.plan and not attempt.plan.missing:
                found = True
                if values.get("model.remat") == "full":
                    break


def _variants(asked: Subject, target: Target, tried: list[Attempt]) -> Iterator[Attempt]:
    """Yields variants of the best of the attempts `tried`, which grow, unless none fits."""

    def best() -> Attempt | None:
        found = min(tried, key=lambda each: each.rank, default=None)
        return found if found and found.plan and not found.plan.missing else None

    of = best()
    if of and of.plan and of.plan.subject.config.model.scan_layers:
        # Unrolled layers take longer to compile and often run faster.
        attempt = _attempt(asked, target, {**of.values, _SCAN: False})
        if attempt:
            yield attempt
    of = best()
    if of is None:
        return
    given = asked.config.compiler_options
    for group in _OPTIONS.get(target.devices[0].platform, ()):
        values = dict(each.split("=", 1) for each in (*given, *group))
        options = tuple(f"{name}={value}" for name, value in values.items())
        attempt = _attempt(asked, target, {**of.values, _COMPILER: options})
        if attempt:
            yield attempt


def _in_parts(attempt: Attempt, asked: Subject, parts: int) -> int:
    """Estimates the bytes per device if the attempt's batch were split into `parts`."""
    more = parts // asked.config.microbatches
    plan = attempt.plan
    if plan is None:
        return attempt.refused.needed // more if isinstance(attempt.refused, TooLarge) else 0
    held = plan.train.memory.parts
    parameters = held.get(PARAMETERS, 0)
    state = parameters + held.get(OPTIMIZER_STATE, 0)
    # The sum of the gradients is kept as well.
    return state + parameters + (plan.needed - state) // more


def _attempt(
    asked: Subject, target: Target, values: Values, known: Plan | TooLarge | None = None
) -> Attempt | None:
    """Returns an attempt, or None if the model or batch cannot be divided that way."""
    before = dict(field_paths.leaves(asked.config))
    if before["mesh.data"] == -1:
        devices = len(target.devices)
        before["mesh.data"] = devices // (before["mesh.fsdp"] * before["mesh.tensor"])
    differing = {path: value for path, value in values.items() if before[path] != value}
    if known and not differing:
        return Attempt({}, None, known) if isinstance(known, TooLarge) else Attempt({}, known)
    try:
        subject = asked.with_values(values)
        compiled.make_program(subject, target)
    except UserError:
        return None
    try:
        return Attempt(differing, compiled.compile_plan(subject, target, evaluation=False))
    except UserError as error:
        return Attempt(differing, None, error)


def _ways(asked: Subject, mesh: Values) -> Iterator[Values]:
    """Yields ways to keep fewer activations for the backward pass, the fastest first."""
    config = asked.config
    yield {"model.remat": config.model.remat}
    for remat in ("dots", "full"):
        if remat != config.model.remat:
            yield {"model.remat": remat}
    rows = asked.rows // (mesh["mesh.data"] * mesh["mesh.fsdp"])
    for parts in _MICROBATCHES:
        if parts > config.microbatches and rows % parts == 0:
            yield {"model.remat": "dots", "microbatches": parts}


def _meshes(asked: Subject, target: Target) -> list[Values]:
    """Returns the meshes on which the state fits; those that divide the model least come first."""
    devices, config = len(target.devices), asked.config
    slices = len({getattr(device, "slice_index", 0) for device in target.devices})
    fitting: list[tuple[tuple, Values]] = []
    for tensor in _divisors(devices, _MOST_TENSOR):
        for fsdp in _divisors(devices // tensor):
            sizes = {"data": devices // tensor // fsdp, "fsdp": fsdp, "tensor": tensor}
            if sizes["data"] % slices:
                continue
            try:
                check_dimensions(
                    sizes, config.mesh.rules, config.model, config.phases.sizes, config.microbatches
                )
            except UserError:
                continue
            values = {f"mesh.{axis}": size for axis, size in sizes.items()}
            fitting.append(((tensor * fsdp, tensor), values))
    if not fitting:
        return []
    most = _STATE_SHARE * (target.memory or math.inf)
    roomy = [each for each in fitting if _state_bytes(asked.with_values(each[1]), target) <= most]
    if not roomy:
        fitting.sort(key=lambda each: -each[0][0])
        return [values for _, values in fitting]
    return [values for _, values in sorted(roomy, key=lambda each: each[0])]


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]


def _state_bytes(subject: Subject, target: Target) -> int:
    """Returns the bytes that a device keeps for a step: the state, and gathered parameters."""
    program = compiled.make_program(subject, target)
    state = program.abstract_state()
    kept = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves((state.params, state.opt_state))
    )
    if program.shares is None:
        return kept
    item = jax.numpy.dtype(subject.config.model.dtype).itemsize
    gathered = jax.tree.map(
        lambda leaf, used: math.prod(used.shard_shape(leaf.shape)) * item,
        state.params,
        program.shares.used,
    )
    return kept + sum(jax.tree.leaves(gathered))
