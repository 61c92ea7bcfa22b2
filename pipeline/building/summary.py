"""What a build says of itself: the table at its end, and that of the rules of filters."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.building import advice, graph, lifecycle
from pipeline.building.options import Options
from pipeline.filtering.stages import ALONE, FIRST, JUDGED
from tasks import registry
from tasks.cache.manifest import Shard
from tasks.terminal.table import table


def show(
    options: Options,
    job: graph.Job,
    shards: dict[lifecycle.ShardKey, Shard],
    read_bytes: int,
    seconds: float,
    advise: bool,
) -> None:
    """Prints what a build has written and left out, its speed, and what to run next.

    Args:
      options: options of the build.
      job: what was built.
      shards: all shards, by (split, number).
      read_bytes: bytes of the corpus that this build has read.
      seconds: how long it took.
      advise: whether to print the command that comes next.
    """
    plan = job.plan
    columns = {
        split: [shards[split, index] for index in range(count)]
        for split, count in plan.shards.items()
    }

    def total(split: str, field: str) -> int:
        return sum(getattr(shard, field) for shard in columns[split])

    rows = [
        *(
            (field, *(f"{total(split, field):,}" for split in columns))
            for field in ("documents", "tokens", "rows")
        ),
        ("text, MB", *(f"{total(split, 'text_bytes') / 1e6:,.2f}" for split in columns)),
        (
            "bytes per token",
            *(
                f"{total(split, 'text_bytes') / max(total(split, 'text_tokens'), 1):.2f}"
                for split in columns
            ),
        ),
        (
            "on disk, MB",
            *(
                f"{sum(entry.bytes for s in column for entry in s.files.values()) / 1e6:,.2f}"
                for column in columns.values()
            ),
        ),
        *_pair_rows(columns),
        *(
            (f"left out: {reason}", *(f"{dropped(each)[reason]:,}" for each in columns.values()))
            for reason in sorted(dropped(list(shards.values())))
        ),
        *(
            (f"edited: {what}", *(f"{_edits(each)[what]:,}" for each in columns.values()))
            for what in sorted(_edits(list(shards.values())))
        ),
    ]
    print(table(("", *columns), rows))
    held_out = "validation" in columns and total("validation", "rows") > 0
    print(
        f"{job.folder}: read {read_bytes / 1e6:,.1f} MB in {seconds:.1f} s, "
        f"{read_bytes / 1e6 / seconds:.1f} MB/s"
    )
    if advise:
        task = registry.get(plan.task, options.task_module)
        print(f"next: {advice.pretrain(task, options, held_out)}")
    if not held_out:
        print(
            f"{plan.task} has no validation split, as no document was held out: to evaluate the "
            "model, build with a larger share in --corpus, as ?validation=0.1, in another "
            "--cache_dir"
        )


def _pair_rows(columns: dict[str, list[Shard]]) -> list[tuple[str, ...]]:
    """Returns the report's lines on pairs: longest sides, and how many were cut or split."""
    counts = {
        split: [shard.pairs for shard in shards if shard.pairs] for split, shards in columns.items()
    }
    if not any(counts.values()):
        return []
    lines = []
    for side in ("inputs", "targets"):
        longest = (max(getattr(each, f"longest_{side}") for each in of) for of in counts.values())
        lines.append((f"longest {side}", *(f"{tokens:,}" for tokens in longest)))
        cut = [sum(getattr(each, f"cut_{side}") for each in of) for of in counts.values()]
        if any(cut):
            lines.append((f"cut {side}", *(f"{count:,}" for count in cut)))
    split = [sum(shard.split_documents for shard in shards) for shards in columns.values()]
    if any(split):
        lines.append(("split pairs", *(f"{count:,}" for count in split)))
    return lines


def dropped(shards: list[Shard]) -> Counter[str]:
    """Returns how many documents some shards leave out, by reason."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.dropped)
    return counts


def _edits(shards: list[Shard]) -> Counter[str]:
    """Returns how many edits filters made in the documents of some shards, by kind."""
    counts: Counter[str] = Counter()
    for shard in shards:
        counts.update(shard.edits or {})
    return counts


def rules_table(counts: Mapping[tuple[str, str], Any]) -> str:
    """Returns the documents that each rule would drop by itself, and those that it drops first."""
    rows = [("documents judged", str(counts[JUDGED, ""]), "")]
    for kind, reason in counts:
        if kind == ALONE:
            rows.append((reason, str(counts[kind, reason]), str(counts[FIRST, reason])))
    return table(("", "would drop", "is the first to"), rows)
