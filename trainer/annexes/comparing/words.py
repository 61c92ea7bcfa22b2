"""Describes the comparison of two runs in words, for a terminal."""

from collections.abc import Iterator
from typing import Any

from tasks.annexes.inspecting.show import printable
from tasks.terminal.table import table
from trainer.annexes.comparing import settings
from trainer.annexes.comparing.data import Batch
from trainer.annexes.comparing.tensors import Difference
from trainer.annexes.comparing.verdict import CONFIGURATION, DATA, STEP, TENSOR, Verdict

_SHOWN = 12


def text(found: Verdict) -> str:
    """Returns a verdict as text: a line per layer, with details of those that differ."""
    one, other = found.runs
    blocks = [f"A  {one.folder}\nB  {other.folder}"]
    for name, lines in (
        (CONFIGURATION, _configuration(found)),
        (DATA, _data(found)),
        (STEP, _steps(found)),
        (TENSOR, _tensors(found)),
    ):
        first, *rest = lines
        indented = ("\n".join(f"  {line}" for line in block.split("\n")) for block in rest)
        blocks.append("\n".join([f"{name:<14} {first}", *indented]))
    if found.first:
        blocks.append(f"first difference: {_verdict(found)}")
    else:
        both = found.steps.lines or found.tensors.steps
        nothing = "but neither metrics nor checkpoints are in both"
        far = "as far as both have come" if both else nothing
        blocks.append(f"the runs are the same, {far}")
    # Without control characters other than line breaks.
    return "\n".join(printable(line) for line in "\n\n".join(blocks).split("\n"))


def _verdict(found: Verdict) -> str:
    if found.first == CONFIGURATION:
        return f"configuration, {found.settings[0].path}"
    if found.first == DATA:
        batch = found.data.batch
        where = f"update {batch.step:,}, row {batch.row}" if batch else found.data.records[0]
        return f"data, {where}"
    if found.first == STEP and found.steps.first:
        return f"step, metrics of {found.steps.first.split} at {found.steps.first.step:,}"
    first = found.tensors.differences[0].name
    return f"tensor, {first} of checkpoint {found.tensors.step:,}"


def _configuration(found: Verdict) -> Iterator[str]:
    changed = [setting for setting in found.settings if setting.effect != settings.NONE]
    names = {settings.RESULTS: "results", settings.ROUNDING: "rounding", settings.NONE: "nothing"}
    fields = "1 field differs" if len(changed) == 1 else f"{len(changed)} fields differ"
    yield fields if changed else "the same"
    if found.settings:
        rows = [(e.path, *map(_short, e.values), names[e.effect]) for e in found.settings]
        yield table(("field", "A", "B", "changes"), rows)
    if found.software:
        rows = [(name, _short(a), _short(b)) for name, a, b in found.software]
        yield table(("software and hardware", "A", "B"), rows)


def _data(found: Verdict) -> Iterator[str]:
    data = found.data
    span = "batches of updates {:,} to {:,}".format(*data.compared) if data.compared else ""
    if data.batch:
        yield _batch(data.batch)
    elif data.records:
        yield f"records differ{span and f'; the {span} are the same'}"
    else:
        without = "no batch could be" if data.lost else "no batch had to be"
        yield f"the same ({span or f'what was recorded; {without} compared'})"
    yield from data.records
    documents = data.batch.documents if data.batch else ()
    yield from (f"{side} {line}" for side, line in zip("AB", documents, strict=False))
    yield from (f"note: {note}" for note in data.notes)


def _batch(batch: Batch) -> str:
    where = f"update {batch.step:,}"
    if batch.row is None:
        return f"{where}, {batch.feature}: {batch.note}"
    where += f", row {batch.row}, {batch.feature}"
    count = "1 row" if batch.rows == 1 else f"{batch.rows} rows"
    where += f" at position {batch.position}" if batch.position is not None else ""
    assert batch.values
    shown = [str(value) for value in batch.values]
    if batch.pieces:
        shown = [f"{value} {piece!r}" for value, piece in zip(shown, batch.pieces, strict=True)]
    return f"{where}: {shown[0]} and {shown[1]}; {count} of the batch in all"


def _steps(found: Verdict) -> Iterator[str]:
    report = found.steps.first
    if report is None:
        common = f"{found.steps.lines} lines that both have, up to step {found.steps.last:,}"
        yield f"the same ({common})" if found.steps.lines else "no line that both runs have"
        return
    after = f"and was the same at {report.after:,}" if report.after else "its first report"
    yield f"{report.split} differs first at step {report.step:,}, {after}"
    rows = [(name, _exact(a), _exact(b)) for name, (a, b) in report.metrics.items()]
    yield table(("metric", "A", "B"), rows)


def _tensors(found: Verdict) -> Iterator[str]:
    tensors = found.tensors
    if not tensors.steps:
        yield "no checkpoint of a step that both runs have"
    elif tensors.step is None:
        steps = ", ".join(map(str, tensors.steps))
        read = ", ".join(map(str, tensors.verified)) or "none"
        how = f"checkpoints {steps}, by their checksums; read: {read}"
        yield f"the same {tensors.arrays} arrays ({how})"
    else:
        count = len(tensors.differences)
        yield f"checkpoint {tensors.step:,}: {count} of {tensors.arrays} arrays differ"
        for name, (a, b) in tensors.counts.items():
            fewer = "B" if b < a else "A"
            yield f"{name} is {a:,} and {b:,}: {fewer} made {abs(a - b):,} fewer"
        for difference in tensors.differences[:_SHOWN]:
            yield _array(difference)
        if count > _SHOWN:
            yield f"… and {count - _SHOWN} more"
    yield from (f"note: {note}" for note in tensors.notes)


def _array(each: Difference) -> str:
    if each.kinds == (None, None) and each.damaged is not None:
        return f"{each.name}: {'AB'[each.damaged]} cannot be read"
    kinds = [kind or "no such array" for kind in each.kinds]
    if kinds[0] != kinds[1]:
        return f"{each.name}: {kinds[0]} and {kinds[1]}"
    if each.differing is None:
        unread = f": {'AB'[each.damaged]} cannot be read" if each.damaged is not None else ""
        return f"{each.name} {kinds[0]}{unread}"
    if not each.differing:
        said = "its checksum was recorded for different bits"
    else:
        assert each.values
        assert each.bits
        place = f" at [{', '.join(map(str, each.index))}]" if each.index else ""
        said = (
            f"{each.differing:,} of {each.elements:,} elements, the first{place}: "
            f"{each.values[0]!r} and {each.values[1]!r} ({each.bits[0]} and {each.bits[1]})"
        )
        said += f"; at most {each.largest:.3g} apart" if each.largest is not None else ""
        said += f", {each.ulps:,} ULP" if each.ulps is not None else ""
    if each.damaged is not None:
        said += f"; {'AB'[each.damaged]} is damaged: it does not match its checksum"
    return f"{each.name} {kinds[0]}: {said}"


def _short(value: Any) -> str:
    shown = "–" if value is None else str(value)
    return shown if len(shown) <= 48 else f"{shown[:45]}…"


def _exact(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
