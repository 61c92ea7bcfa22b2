"""The section of a report on suites: scores of the newest answers, and every question."""

import html
from collections.abc import Iterator, Sequence

from tasks.annexes.pages import document as html_page
from tasks.annexes.questions import scores
from tasks.annexes.questions.scores import Answered
from tasks.storage import files
from trainer.reporting.history import History


def section(runs: Sequence[History]) -> str:
    """Returns the section as HTML; "" if no run has answered a suite."""
    found = [(run, path) for run in runs if (path := _newest(run.folder))]
    if not found:
        return ""
    answers = [(run.name, scores.read(path)) for run, path in found]
    rows = [
        [name] * (len(runs) > 1) + list(scores.cells(score))
        for name, answered in answers
        for score in scores.of(answered)
    ]
    header = ["run"] * (len(runs) > 1) + list(scores.HEADER)
    notes = "".join(html_page.note(f"{run.name}: {path}") for run, path in found)
    parts = [html_page.table("Scores", header, rows), notes]
    for name, answered in answers:
        for one in dict.fromkeys(each.set for each in answered):
            some = [each for each in answered if each.set == one]
            title = f"{name}: {one}" if len(runs) > 1 else one
            parts.append(_questions(title, some))
    return "".join(parts)


def _newest(folder: str) -> str | None:
    """Returns the file of the answers of the last step, without averages; None if there is none."""
    place = files.join(folder, scores.SUITE)
    names = (name.removesuffix(".jsonl") for name in files.list_names(place))
    steps = [int(name) for name in names if name.isdecimal()]
    return scores.path(folder, str(max(steps))) if steps else None


def _questions(title: str, answered: Sequence[Answered]) -> str:
    table = html_page.table(
        title, ("group", "right", "log likelihoods", "text"), _lines(answered), html_last=True
    )
    summary = f"{html_page.text(title)}: {len(answered):,} questions"
    return f"<details><summary>{summary}</summary>{table}</details>"


def _lines(answered: Sequence[Answered]) -> Iterator[tuple[str, str, str, str]]:
    for each in answered:
        asked = each.question
        if asked.is_text:
            size = len(asked.right.encode())
            result = f"{each.bits / max(1, size):.3f} bits/byte"
        else:
            result = "yes" if each.is_right else "no"
        choices = " | ".join(
            f"<b>{html.escape(choice)}</b>" if at == asked.answer else html.escape(choice)
            for at, choice in enumerate(asked.choices)
        )
        text = f"{html.escape(asked.before)}[{choices}]{html.escape(asked.after)}"
        numbers = " | ".join(f"{score:.2f}" for score in each.scores)
        yield asked.group, result, numbers, text
