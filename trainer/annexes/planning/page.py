"""Formats a plan as text and as JSON."""

import json
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any

from tasks.terminal.table import table
from trainer.annexes.planning.compiled import Compiled, Plan, TooLarge
from trainer.annexes.planning.devices import Chip
from trainer.annexes.planning.planned_run import Subject
from trainer.annexes.planning.search import Attempt, as_flags, flags
from trainer.annexes.planning.timing import Timing

_GB = 1e9


def page(plan: Plan, price: float | None = None) -> str:
    """Returns the plan as text; `price`, in dollars per chip-hour, replaces the table's price."""
    lines = [*_head(plan), ("fits", _fit(plan))]
    blocks = [_text(lines), _beside(*_tables(plan.train))]
    if plan.train.timing:
        blocks.append(_traffic(plan.train.timing))
    blocks.append(_text(_cost(plan, price)))
    return "\n\n".join(block for block in blocks if block)


def as_json(value: Plan | TooLarge | list[Attempt], price: float | None = None) -> str:
    """Returns a plan, a refusal or a search's attempts as JSON, in bytes, seconds and dollars."""
    if isinstance(value, Plan):
        return json.dumps(_values(value, price), indent=1)
    if isinstance(value, TooLarge):
        return json.dumps({"fits": False, "needed_bytes": value.needed, "refused": str(value)})
    attempts = [
        {
            "flags": flags(each.plan) if each.plan else None,
            "changed": dict(each.values),
            "refused": str(each.refused or ""),
            "needed_bytes": each.refused.needed if isinstance(each.refused, TooLarge) else None,
            "plan": _values(each.plan, price) if each.plan else None,
        }
        for each in value
    ]
    return json.dumps(attempts, indent=1)


def ranking(attempts: list[Attempt], asked: Subject) -> str:
    """Returns the attempts of a search as a table, the best first, and the best one's flags."""
    header = ("", "ms a step", "MFU", "GB", "flags")
    rows = []
    for attempt in attempts:
        if attempt.plan is None:
            rows.append(("", "-", "-", "-", f"{as_flags(attempt.values)}: {attempt.refused}"))
            continue
        plan = attempt.plan
        fits = "does not fit" if plan.missing else "fits"
        speed = f"{(plan.step or 0) * 1e3:,.1f}", f"{plan.mfu or 0:.1%}"
        rows.append((fits, *speed, f"{plan.needed / _GB:,.1f}", as_flags(attempt.values)))
    best = next((each.plan for each in attempts if each.plan and not each.plan.missing), None)
    last = f"best: {flags(best, asked) or 'as asked'}" if best else "nothing that was tried fits"
    tried = next((each.plan for each in attempts if each.plan), None)
    honest = f"\n\n{_honest(tried)}" if tried else ""
    return f"{table(header, rows)}\n\n{last}{honest}"


def _honest(plan: Plan) -> str:
    chip = plan.target.chip or Chip
    return f"times are {chip.basis}, not measurements: check them on a {chip.unit}"


def _head(plan: Plan) -> Iterator[tuple[str, str]]:
    config, target, model = plan.subject.config, plan.target, plan.subject.config.model
    lengths = " + ".join(str(length) for length in plan.subject.lengths if length)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    yield (
        "model",
        f"{config.preset}: {plan.parameters:,} parameters, vocabulary {model.vocab_size:,}, "
        f"{model.dtype}, attention {model.attention_on(target.kind)}, {config.optimizer.name}",
    )
    yield (
        "devices",
        f"{target.name} ({target.kind}): {len(target.devices)} on {target.hosts} host(s), "
        f"mesh {mesh}, rules {config.mesh.rules}",
    )
    rows = f"{plan.subject.rows:,} rows"
    rows += ", the most of --batch_schedule," * bool(config.batch_schedule)
    yield (
        "step",
        f"{rows} of {lengths} tokens in {config.microbatches} part(s), "
        f"remat {model.remat}, layers {'scanned' if model.scan_layers else 'unrolled'}; each "
        f"host reads {plan.host_rows:,} rows",
    )


def _fit(plan: Plan) -> str:
    limit = plan.target.memory
    needed = f"{plan.needed / _GB:,.2f} GB a device"
    if limit is None:
        return f"unknown: {needed}, and this backend reports no limit"
    have = f"of {limit / _GB:,.2f} GB"
    if plan.missing:
        return f"NO: {needed} {have}, {plan.missing / _GB:,.2f} GB too much"
    return f"yes: {needed} {have}, {(limit - plan.needed) / _GB:,.2f} GB left"


def _tables(train: Compiled) -> tuple[str, str]:
    memory = [
        (part, f"{size / _GB:,.3f}")
        for part, size in sorted(train.memory.parts.items(), key=lambda each: -each[1])
    ]
    memory.append(("all", f"{train.memory.total / _GB:,.3f}"))
    held = table(("held by a device in a step", "GB"), memory)
    if train.timing is None:
        return held, ""
    timing, step = train.timing, train.timing.step or 1.0
    both = [
        (part, timing.seconds[part], timing.estimated.get(part, 0.0)) for part in timing.seconds
    ]
    times = [
        (part, f"{value * 1e3:,.2f}", f"{value / step:.1%}", f"{estimate * 1e3:,.2f}")
        for part, value, estimate in sorted(both, key=lambda each: -each[1])
        if value or estimate
    ]
    times.append(("all", f"{step * 1e3:,.2f}", "100.0%", f"{timing.estimated_step * 1e3:,.2f}"))
    shown = 4 if timing.estimated else 3
    header = ("time of a step", "ms", "share", "XLA's estimate")
    return held, table(header[:shown], [row[:shown] for row in times])


def _beside(left: str, right: str) -> str:
    rows = list(zip_longest(left.splitlines(), right.splitlines(), fillvalue=""))
    width = max(len(each) for each, _ in rows)
    return "\n".join(f"{one:<{width}}      {other}".rstrip() for one, other in rows)


def _traffic(timing: Timing) -> str:
    rows = []
    for kind, total in timing.traffic().items():
        times = (f"{total[name] * 1e3:,.2f}" for name in ("seconds", "exposed"))
        rows.append((kind, f"{total['bytes'] / _GB:,.3f}", *times))
    header = ("sent by a device in a step", "GB", "ms", "ms not hidden by other work")
    blocks = [table(header, rows)] if rows else []
    kernels = [
        (
            kernel.name,
            ", ".join("x".join(map(str, shape)) for shape in kernel.shapes[:2]),
            f"{kernel.times:,}",
            f"{kernel.size / 1e6:,.1f}",
            "unreadable" if kernel.cycles is None else f"{kernel.cycles:,}",
        )
        for kernel in timing.kernels
    ]
    if kernels:
        shown = 5 if timing.scheduled else 4
        columns = ("Pallas kernels", "first operands", "runs", "MB a run moves", "cycles of a run")
        blocks.append(table(columns[:shown], [row[:shown] for row in kernels[:8]]))
    if timing.unread:
        blocks.append(
            f"{timing.unread} products or kernels have no schedule that can be read: they count "
            "with their bytes and operations alone"
        )
    return "\n\n".join(blocks)


def _cost(plan: Plan, price: float | None) -> Iterator[tuple[str, str]]:
    if plan.step:
        mfu = f", MFU {plan.mfu:.1%}" if plan.mfu else ""
        halved = f"{plan.mfu_halved:.1%}" if plan.mfu_halved else ""
        if halved and halved not in mfu:
            mfu += f" ({halved} with half of causal attention)"
        above = plan.step / plan.floor if plan.floor else 0.0
        floor = f", {above:.2f} times the floor of {plan.floor * 1e3:,.1f} ms" if plan.floor else ""
        yield (
            "speed",
            f"{plan.step * 1e3:,.1f} ms a step{floor}{mfu}, {plan.tokens_per_second:,.0f} tokens a "
            f"second and {plan.target.chip.unit if plan.target.chip else 'device'}",
        )
        yield from _expected(plan)
        hours, dollars, origin = _bill(plan, price)
        cost = f", ${dollars:,.2f}" if dollars is not None else ""
        yield (
            "the run",
            f"{plan.subject.config.train_steps:,} steps: {hours:,.1f} h{cost}; evaluations and "
            "checkpoints come on top",
        )
        if origin:
            yield "price", origin
    elif plan.least:
        yield "speed", f"at least {plan.least * 1e3:,.1f} ms a step, at the peak"
    else:
        yield "speed", f"{plan.flops / 1e9:,.1f} GFLOP a step; no time estimate here"
    seconds = plan.train.seconds
    if plan.evaluation:
        took, size = plan.evaluation.timing, plan.evaluation.memory.total
        ms = f", {took.step * 1e3:,.1f} ms" if took else ""
        yield "evaluation", f"a batch{ms}, {size / _GB:,.2f} GB a device"
        seconds += plan.evaluation.seconds
    yield "compiled", f"in {seconds:,.0f} s"
    if plan.step:
        yield "", _honest(plan)


def _expected(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields the times between which calibration expects a step and the run."""
    if not plan.expected or not plan.target.chip or not plan.step:
        return  # nothing was measured on such devices, or nothing is planned
    chip, (low, high) = plan.target.chip, plan.expected
    hours = _bill(plan, None)[0] / plan.step
    yield (
        "expected",
        f"{low * 1e3:,.1f} to {high * 1e3:,.1f} ms a step, {low * hours:,.1f} to "
        f"{high * hours:,.1f} h in all, by {chip.calibration.rows} steps that others measured on "
        f"{chip.unit}s",
    )


def _bill(plan: Plan, price: float | None) -> tuple[float, float | None, str]:
    config = plan.subject.config
    steps = config.phases.read(config.train_steps) / plan.subject.rows  # if all were the largest
    hours = (plan.step or 0.0) * steps / 3600
    chip = plan.target.chip
    each = price if price is not None or not chip else chip.dollars
    if each is None:
        return hours, None, ""
    unit, origin = (chip.unit, chip.prices) if chip else ("device", "")
    text = f"${each:,.2f} a {unit} and hour: {origin if price is None else '--price'}"
    return hours, hours * len(plan.target.devices) * each, text


def _text(lines: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{subject:<11} {text}" for subject, text in lines)


def _values(plan: Plan, price: float | None) -> dict[str, Any]:
    hours, dollars, origin = _bill(plan, price)
    return {
        "target": plan.target.name,
        "device_kind": plan.target.kind,
        "devices": len(plan.target.devices),
        "hosts": plan.target.hosts,
        "mesh": plan.mesh,
        "flags": flags(plan),
        "parameters": plan.parameters,
        "host_rows": plan.host_rows,
        "fits": None if plan.target.memory is None else not plan.missing,
        "needed_bytes": plan.needed,
        "limit_bytes": plan.target.memory,
        "missing_bytes": plan.missing,
        "train": _of_program(plan.train),
        "evaluation": _of_program(plan.evaluation) if plan.evaluation else None,
        "flops": plan.flops,
        "flops_with_half_of_causal_attention": plan.flops_halved,
        "step_seconds": plan.step,
        "expected_seconds": plan.expected,
        "floor_seconds": plan.floor,
        "mfu": plan.mfu,
        "mfu_with_half_of_causal_attention": plan.mfu_halved,
        "tokens_per_second_per_device": plan.tokens_per_second,
        "train_steps": plan.subject.config.train_steps,
        "hours": hours if plan.step else None,
        "dollars": dollars if plan.step else None,
        "price": origin or None,
    }


def _of_program(compiled: Compiled) -> dict[str, Any]:
    timing = compiled.timing
    return {
        "bytes": compiled.memory.parts,
        "seconds": timing.seconds if timing else None,
        "xla_seconds": timing.estimated if timing else None,
        "unread": timing.unread if timing else None,
        "collectives": timing.traffic() if timing else None,
        "kernels": [vars(kernel) for kernel in timing.kernels] if timing else None,
        "compile_seconds": compiled.seconds,
    }
