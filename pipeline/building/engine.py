"""One build: checks, plan, job for unfinished shards, report."""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pipeline.building import graph, lifecycle, planning, repeated_ids, summary, unknown
from pipeline.building.documents import KEPT_BY, is_fault
from pipeline.building.monitor import Monitor, bad_share, monitored
from pipeline.building.options import Options
from pipeline.exclusion import cache_lists, targets
from pipeline.exclusion.lists import Given, given
from pipeline.runners import job_parts
from pipeline.runners.engines import Engine
from pipeline.tokenizer import tokenize
from tasks import annexes, vocabulary
from tasks.cache import plan_check
from tasks.cache.manifest import Shard
from tasks.storage import files
from tasks.terminal.command_line import UserError


def build(options: Options, runner: Engine) -> None:
    """Builds a cache's unfinished shards; prints a report and the next command.

    Raises UserErrors, and OSErrors if the cache cannot be written; finished shards are kept.
    """
    of = planning.checked(options)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        lists = given(options.exclude, scratch)
        if dry_run := dry_run_of(options):
            dry_run(planned(of, lists, scratch), runner)
            return
        with locked(of, runner) as claim:
            run(planned(of, lists, scratch), claim, runner)


def dry_run_of(options: Options) -> Callable[[planning.Planned, Engine], None] | None:
    """Returns what takes the place of the build, if its flag is set: the slot "dry_runs"."""
    flags = getattr(options, "dry_run", None)
    return annexes.get("dry_runs", "build") if flags and flags.dry_run else None


def planned(of: planning.Checked, lists: list[Given], scratch: str) -> planning.Planned:
    corpus = planning.listed(of)
    (own,) = targets.fitted(lists, {"": corpus.target}, scratch).values()
    return planning.planned(corpus, own)


@contextlib.contextmanager
def locked(of: planning.Checked, runner: Engine) -> Iterator[job_parts.Claim]:
    """Locks the cache's folder, after a check of what only a running job would report."""
    runner.check(of.spec, of.options.cache_dir)
    share = job_parts.share(of.options.part)
    with job_parts.claimed(of.folder, "build", "--cache_dir", share) as claim:
        yield claim


def run(
    planned: planning.Planned, claim: job_parts.Claim, runner: Engine, advise: bool = True
) -> None:
    """Builds a planned cache, or a part of it, in the folder of the `claim`; prints a report."""
    job, lists, options = planned.job, planned.lists, planned.of.options
    folder, plan = job.folder, job.plan
    claim.check()
    with claim.alone():
        lifecycle.begin(folder, plan, planned.of.vocabulary, options.extend, lists, planned.earlier)
        if not claim.share.is_whole and lifecycle.plan_before(folder, plan):
            lifecycle.settle(folder, plan, lifecycle.survey(folder, plan, check=False))
    for note in cache_lists.notes(plan, lists):
        print(note)
    started = time.monotonic()
    done, shards = _work(planned, claim, runner)
    claim.check()
    there = set(files.list_names(folder)) if not claim.share.is_whole else set[str]()
    if _is_waiting(planned, claim, lambda each: there >= each.names(plan, "receipt")):
        return
    with claim.alone():
        if not claim.share.is_whole:
            found = lifecycle.survey(folder, plan, check=False)
            shards = {key: shard for key, shard in found.items() if shard}
        if _is_waiting(planned, claim, lambda each: shards.keys() >= set(each.shards)):
            return
        check_documents(list(shards.values()), options.max_quarantined, folder)
        _check_rows(job, shards)
        lost = unknown.share(list(shards.values()))
        unknown.check(lost, options.max_unknown, job, planned.of.vocabulary)
        for line in cache_lists.left_out(folder, plan, shards, lists):
            print(line)
        is_new = lifecycle.complete(folder, plan, shards)
        claim.tidy()
    if is_new or done:
        summary.show(options, job, shards, done, time.monotonic() - started, advise)
        if done and (line := repeated_ids.found(folder, plan, shards)):
            print(line)
    else:
        state = "complete" if files.is_remote(folder) else "complete and valid"
        print(f"{folder} is {state}: nothing to do")


def _is_waiting(
    planned: planning.Planned, claim: job_parts.Claim, is_done: Callable[[graph.Assignment], bool]
) -> bool:
    """Returns whether pieces of other parts are missing, and prints of which."""
    if claim.share.is_whole:
        return False
    numbered = enumerate(planned.assignments)
    missing = [number for number, each in numbered if not is_done(each)]
    if missing:
        print(claim.unfinished(missing, len(planned.assignments)))
    return bool(missing)


def divided(
    assignments: Sequence[graph.Assignment], found: Mapping[lifecycle.ShardKey, Shard]
) -> tuple[dict[graph.Assignment, list[Shard]], list[graph.Assignment]]:
    """Returns the finished assignments with their shards, and those left to do."""
    kept: dict[graph.Assignment, list[Shard]] = {}
    to_do: list[graph.Assignment] = []
    for assignment in assignments:
        shards = [shard for key in assignment.shards if (shard := found.get(key))]
        if len(shards) == len(assignment.shards):
            kept[assignment] = shards
        else:
            to_do.append(assignment)
    return kept, to_do


def _work(
    planned: planning.Planned, claim: job_parts.Claim, runner: Engine
) -> tuple[int, dict[lifecycle.ShardKey, Shard]]:
    """Builds missing and damaged shards of a share; returns the corpus bytes read, and receipts."""
    job, options = planned.job, planned.of.options
    assignments = claim.share.of(planned.assignments)
    keys = [key for assignment in assignments for key in assignment.shards]
    surveyed = lifecycle.survey(job.folder, job.plan, keys=keys)
    found = lifecycle.settle(job.folder, job.plan, surveyed)
    kept, to_do = divided(assignments, found)
    if not to_do:
        return 0, found
    if kept:
        print(f"kept {len(kept):,} finished pieces of {len(assignments):,}, {len(to_do):,} to do")
    guard = plan_check.guard(job.folder, job.plan.fingerprint)
    guard.check()
    redone = [key for each in to_do for key in each.shards]
    if lifecycle.is_marked(job.folder, job.plan, redone):
        with claim.alone():
            lifecycle.invalidate(job.folder, job.plan, redone, guard.remove)
    if options.tokenizer == tokenize.FAST:
        loaded = vocabulary.of_cache(job.folder, job.plan.vocabulary)
        if reason := tokenize.refusal(loaded):
            print(f"all texts will be left to {loaded.codec.library}: {reason}")
    others = sum(assignment.piece.bytes for assignment in planned.assignments) - sum(
        assignment.piece.bytes for assignment in assignments
    )
    monitor = Monitor(job.folder, job.plan, kept, to_do, others)

    def hopeless(monitor: Monitor) -> bool:
        return bad_share(monitor.shards, monitor.unseen) > options.max_quarantined

    try:
        with monitored(monitor, files.is_remote(job.folder), hopeless):
            counts = graph.run(job, to_do, runner)
    except KeyboardInterrupt:
        if hopeless(monitor):
            check_documents(monitor.shards, options.max_quarantined, job.folder)
        raise
    if options.tokenizer == tokenize.FAST:
        _report_tokenizer(job, counts)
    written = lifecycle.survey(job.folder, job.plan, check=False, keys=keys)
    missing = [key for key, shard in written.items() if shard is None]
    if missing:
        raise UserError(
            f"the job succeeded, but {len(missing):,} of {len(written):,} shards are missing, the "
            f"first is {missing[0][0]} {missing[0][1]}: run the same command to build them"
        )
    read = sum(each.piece.bytes for each in to_do)
    return read, {key: shard for key, shard in written.items() if shard}


def _report_tokenizer(job: graph.Job, counts: Counter[str]) -> None:
    """Prints how many documents the library encoded or audited, if the runner returned counts."""
    encoded, left = counts["encoded"], counts["left to the library"]
    if not encoded:
        return
    loaded = vocabulary.of_cache(job.folder, job.plan.vocabulary)
    library = loaded.codec.library
    if left == encoded:
        reason = tokenize.Tokenizer(loaded, law=job.plan.law).refusal
        print(f"all texts were left to {library}{f': {reason}' if reason else ''}")
        if counts["audited"]:
            print(f"encoded {counts['audited']:,} of them twice: no difference")
    else:
        some = f", {left:,} of them by {library}" if left else ""
        audit = f"audited {counts['audited']:,} against {library}: no difference"
        if why := tokenize.other_law(loaded, job.plan.law):
            audit = f"none audited, because {why}"
        print(f"tokenized {encoded:,} texts{some}; {audit}")


def check_documents(shards: list[Shard], limit: float, folder: str = "") -> None:
    """Raises UserError if more documents are faulty; `folder` has those that were left out."""
    share = bad_share(shards)
    if share > limit:
        reasons = summary.counted(shards, "dropped")
        top = ", ".join(
            f"{count:,} {reason}" for reason, count in reasons.most_common() if is_fault(reason)
        )
        see = f"see the *.quarantine-* files in {folder}, then " if folder else ""
        rest = " and run again; finished shards are kept" if folder else ""
        raise UserError(
            f"{share:.1%} of the documents are faulty ({top}), more than --max_quarantined="
            f"{limit}: {see}correct the corpus or raise the limit{rest}{_other_choice(reasons)}"
        )


def _other_choice(reasons: Iterable[str]) -> str:
    """Returns a hint at the flags that keep documents that spell special tokens."""
    flags = [flag for reason, flag in KEPT_BY.items() if any(map(reason.match, reasons))]
    named = " and ".join(flags)
    return f"; such documents are kept with {named}, in another --cache_dir" if flags else ""


def _check_rows(job: graph.Job, shards: dict[lifecycle.ShardKey, Shard]) -> None:
    first = "train" if "train" in job.plan.shards else next(iter(job.plan.shards))
    if not any(shard.rows for (split, _), shard in shards.items() if split == first):
        held_out = sum(shard.documents for shard in shards.values())
        if held_out:
            raise UserError(
                f"{job.corpus.spec} leaves no document in the split {first}: a hash of the ids "
                f"holds out all {held_out:,} for validation, as documents of one id go together; "
                "give another ?id=COLUMN, or ?validation=0"
            )
        reasons = summary.counted(list(shards.values()), "dropped").most_common(3)
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        raise UserError(
            f"empty corpus: {job.corpus.spec} has no document with text in the split {first}"
            + (f"; left out: {left_out}" if left_out else "")
        )
