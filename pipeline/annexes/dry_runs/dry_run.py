"""A dry run: what a planned build would make, and what that takes."""

import contextlib
import json
import sys

from pipeline.annexes.dry_runs import estimate as sampling
from pipeline.building import engine, graph, lifecycle, planning, unknown
from pipeline.exclusion import cache_lists
from pipeline.runners import job_parts
from pipeline.runners.engines import Engine, local
from tasks.cache import plan_check
from tasks.cache.manifest import Shard
from tasks.terminal.table import table


def estimate(planned: planning.Planned, runner: Engine) -> None:
    """Prints the estimated size, time and cost of a build."""
    job, assignments, lists = planned.job, planned.assignments, planned.lists
    options, loaded = planned.of.options, planned.of.vocabulary
    flags = options.dry_run  # type: ignore[attr-defined]
    existing = lifecycle.check(job.folder, job.plan, options.extend)
    found: dict[lifecycle.ShardKey, Shard] = {}
    if existing:
        surveyed = lifecycle.survey(job.folder, existing, check=False)
        found = lifecycle.settle(job.folder, existing, surveyed, write=False)
        if plan_check.excludes_more(existing, job.plan):
            for key in list(cache_lists.affected(job.folder, existing, job.plan, lists, found)):
                del found[key]
    kept, to_do = engine.divided(job_parts.share(options.part).of(assignments), found)
    pieces = [assignment.piece for assignment in to_do]
    here = runner if runner.is_local else local()
    copies = cache_lists.copies(job.folder, job.plan, lists)
    expected = sampling.estimate(job, loaded, pieces, options.workers, here, copies)

    size = sum(assignment.piece.bytes for assignment in assignments)
    left = sum(piece.bytes for piece in pieces)
    hours = expected.core_seconds / 3600
    price = flags.price_per_vcpu_hour
    bill = runner.bill
    dollars = hours * (bill.dollars if price is None else price) if bill else None

    def check() -> None:
        engine.check_documents(expected.shards, options.max_quarantined)
        unknown.check(unknown.share(expected.shards), options.max_unknown, job, loaded)

    if flags.json:
        with contextlib.redirect_stdout(sys.stderr):
            check()
        counts = {
            split: {name: quantity.value for name, quantity in each.items()}
            for split, each in expected.counts.items()
        }
        local_seconds = expected.seconds if here is runner else None
        values = {
            **{"folder": job.folder, "bytes": size, "bytes_left": left, "counts": counts},
            **{"seconds": local_seconds, "core_seconds": expected.core_seconds},
            "dollars": dollars,
        }
        print(json.dumps(values))
        return
    splits = list(job.plan.shards)
    rows: list[tuple[object, ...]]
    rows = [("shards", *(f"{count:,}" for count in job.plan.shards.values()))]
    for name in ("documents", "tokens", "rows"):
        rows.append((name, *(expected.counts[split][name] for split in splits)))
    rows.append(("on disk, MB", *(expected.counts[split]["disk"] / 1e6 for split in splits)))
    print(table(("", *splits), rows))
    if job.plan.filters:
        print(graph.filtering("table")(expected.filtered))
    check()
    seconds = (
        f" in {expected.seconds:.1f} s with --workers={options.workers}" if here is runner else ""
    )
    print(
        f"{job.folder}: {len(job.plan.corpus.get('files', [])):,} files, {size / 1e6:,.1f} MB in "
        f"{len(assignments):,} pieces, {len(kept):,} of them built; sampled "
        f"{expected.sampled / 1e6:,.1f} MB\nto do: {left / 1e6:,.1f} MB{seconds}"
    )
    if bill:
        print(
            f"on {bill.service}: {hours:,.2f} vCPU-hours, ${dollars:,.2f}, both ± "
            f"{bill.error:.0%}: measured on this machine's cores, "
            "excluding the time that workers take to start"
        )
