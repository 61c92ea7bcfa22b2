"""The report of a search, as a table and as JSON."""

import dataclasses
from typing import Any

from pipeline.annexes.deduplication.clusters import Result
from pipeline.annexes.deduplication.contamination import Summary
from pipeline.annexes.deduplication.plan import NONE, PARAGRAPH, Job
from tasks.terminal.table import table

# Upper bounds of the cluster-size classes in the table.
_SIZES = (2, 3, 5, 10, 100)


def as_json(
    job: Job, result: Result, summaries: list[Summary], seconds: dict[str, float]
) -> dict[str, Any]:
    """Returns the content of report.json; `seconds` has this command's times and bytes."""
    rules = job.rules
    return {
        "corpus": corpus_of(job),
        "rules": dataclasses.asdict(rules) | {"threshold": rules.threshold, "wanted": rules.wanted},
        "counts": dict(sorted(result.counts.items())),
        "clusters": {str(size): count for size, count in sorted(result.sizes.items())},
        "false_positives": _false_positives(job, result),
        "against": [summary._asdict() for summary in summaries],
        "this_run": seconds,
    }


def corpus_of(job: Job) -> str | dict[str, str]:
    """Returns the SPEC of the only corpus, or a dict of name -> SPEC."""
    specs = {name: str(corpus.spec) for name, corpus in job.corpora.items()}
    return specs.get("", specs)


def _false_positives(job: Job, result: Result) -> float | None:
    """Returns the expected share of near duplicates below `wanted`; None if not estimated."""
    if not job.rules.near or job.rules.wanted >= 1:
        return None
    return result.unlike_twin / max(result.counts["near"], 1)


def text(job: Job, result: Result, summaries: list[Summary]) -> str:
    """Returns the report for a terminal."""
    counts, rules = result.counts, job.rules
    rows = [("documents", f"{counts['documents']:,}"), ("MB", f"{counts['text_bytes'] / 1e6:,.1f}")]
    if rules.unit == PARAGRAPH:
        rows.append(("paragraphs", f"{counts['units']:,}"))
    listed = counts["exact"] + counts["near"] + counts["contaminated"]
    share = listed / max(counts["units"], 1)
    if rules.duplicates != NONE:
        rows.append(("exact duplicates", f"{counts['exact']:,}"))
    if rules.near:
        rows.append(("near duplicates", f"{counts['near']:,}"))
    if summaries:
        rows.append(("contaminated", f"{counts['contaminated']:,}"))
    rows.append(("listed", f"{listed:,} ({share:.1%})"))
    if rules.duplicates != NONE:
        rows.append(("clusters", f"{counts['groups']:,}"))
        rows += _clusters(result.sizes)
    if rules.near:
        half = (1 - 0.5 ** (1 / rules.bands)) ** (1 / rules.rows)
        words = f"similarity at which half the pairs are found, {rules.bands} x {rules.rows}"
        rows.append((words, f"{half:.2f}"))
    if (expected := _false_positives(job, result)) is not None:
        words = f"expected false positives (less than {rules.wanted:.2f} similar to the kept one)"
        rows.append((words, f"{expected:.2%}"))
    for summary in summaries:
        short = f", {summary.short:,} shorter than {rules.ngram} words" if summary.short else ""
        rows.append((f"against {summary.corpus}", f"{summary.examples:,} examples{short}"))
    if counts["repeated"]:
        rows.append(("ids shared by several documents", f"{counts['repeated']:,}"))
    return table(("", ""), rows)


def _clusters(sizes: dict[int, int]) -> list[tuple[str, str]]:
    rows = []
    before = 1
    for end in (*_SIZES, max(sizes, default=0)):
        count = sum(number for size, number in sizes.items() if before < size <= end)
        if count:
            name = f"{end:,}" if end == before + 1 else f"{before + 1:,} to {end:,}"
            rows.append((f"  of {name}", f"{count:,}"))
        before = max(before, end)
    return rows
