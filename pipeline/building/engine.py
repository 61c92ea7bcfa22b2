"""One build: checks, plan, Beam job for unfinished shards, report."""

import contextlib
import tempfile
import time
from collections import Counter
from collections.abc import Mapping

from pipeline.building import graph, lifecycle, summary
from pipeline.building.documents import is_fault
from pipeline.building.monitor import Monitor, bad_share, monitored
from pipeline.building.options import Options
from pipeline.excluding import cache_lists
from pipeline.excluding.lists import Given, given
from pipeline.filtering import sets
from pipeline.runners import beam_job, dataflow, secret
from pipeline.tokenizer import tokenize
from tasks import registry, vocabulary
from tasks.cache.manifest import PAIRS, TOO_LONG, PairLimits, Plan, Shard
from tasks.cache.plan_check import check_writable, excludes_more
from tasks.reading import sources
from tasks.storage import files, lock
from tasks.task import OBJECTIVES, TaskSpec, objective_of
from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.table import table
from tasks.unit import Unit
from tasks.vocabulary import Vocabulary


def build(options: Options, beam_arguments: list[str], advise: bool = True) -> None:
    """Builds a cache's unfinished shards; prints a report and, if `advise`, the next command.

    Raises UserErrors, and OSErrors if the cache cannot be written; finished shards are kept.
    """
    task = _task(options)
    spec = _spec(options, task)
    if options.hf_token_secret:
        if spec.kind != "hf":
            raise UserError("--hf_token_secret is for corpora from the Hugging Face Hub")
        secret.provide_hf_token(options.hf_token_secret)
    loaded = vocabulary.load(options.vocabulary, options.extra_ids)
    where = f"the vocabulary {options.vocabulary}"
    task.check(task.lengths, loaded.ids, _separator(options, task), where)
    folder = files.join(options.cache_dir, task.name)
    with contextlib.ExitStack() as stack:
        lists = given(options.exclude, stack.enter_context(tempfile.TemporaryDirectory()))
        if options.dry_run:
            planned = _planned(options, task, loaded, folder, lists)
            _print_estimate(options, beam_arguments, planned, loaded, lists)
            return
        beam_job.check(beam_arguments, spec, options.cache_dir)
        held = stack.enter_context(lock.claimed(folder, "build", "--cache_dir"))
        job, assignments = _planned(options, task, loaded, folder, lists)
        plan = job.plan
        held.check()
        lifecycle.begin(folder, plan, loaded, options.extend, lists)
        for note in cache_lists.notes(plan, lists):
            print(note)
        earlier: set[str] = set()
        for generation in plan.generations[:-1]:
            earlier.update(generation)
            before = [each for each in assignments if each.piece.parts[0].file.name in earlier]
            lifecycle.renumber(folder, plan, _shard_counts(before))
        started = time.monotonic()
        done, shards = _work(job, assignments, options, beam_arguments)
        _check_documents(list(shards.values()), folder, options.max_quarantined)
        _check_rows(job, shards)
        for line in cache_lists.unfound(folder, plan, shards, lists):
            print(line)
        held.check()
        if lifecycle.complete(folder, plan, shards) or done:
            summary.show(options, job, shards, done, time.monotonic() - started, advise)
        else:
            state = "complete" if files.is_remote(folder) else "complete and valid"
            print(f"{folder} is {state}: nothing to do")


def _task(options: Options) -> TaskSpec:
    name = options.task
    if options.name is None:
        if name in OBJECTIVES:
            raise UserError(
                f"--task={name} is an objective: add --name=NAME, which names the corpus; the "
                f"task is then called NAME_{name}"
            )
        return registry.get(name, options.task_module)
    if name not in OBJECTIVES:
        raise UserError(
            f"--name={options.name} needs one of the objectives {', '.join(OBJECTIVES)} as --task, "
            f"not {name}"
        )
    return registry.get(named_task(options), options.task_module)


def named_task(options: Options) -> str:
    """Returns NAME_TASK; raises a UserError if no task can have this name."""
    name = f"{options.name}_{options.task}"
    if not options.name or objective_of(name) != options.task:
        raise UserError(
            f"--name={options.name} cannot begin the name of a task {name}: choose a name made of "
            "letters, digits, _, - and ."
        )
    return name


def _spec(options: Options, task: TaskSpec) -> sources.CorpusSpec:
    text = options.corpus[0] if options.corpus else task.corpus
    if not text:
        meant = nearest(task.name, registry.tasks(options.task_module))
        raise UserError(
            f"task {task.name}{meant} has no corpus of its own: give --corpus, which is "
            f"{sources.forms()}"
        )
    return sources.parse(text)


_Planned = tuple[graph.Job, list[graph.Assignment]]


def _planned(
    options: Options, task: TaskSpec, loaded: Vocabulary, folder: str, lists: list[Given]
) -> _Planned:
    """Resolves the corpus; returns the job and all pieces with their shards."""
    spec = _spec(options, task)
    limits = _pair_limits(options, task, spec)
    filters = sets.resolve(options.filter, options.task_module, spec.unit)
    existing = lifecycle.planned(folder)
    earlier = existing.generations if existing else []
    if existing:
        sources.check_record(folder, existing.corpus)
    corpus = sources.resolve(spec, options.shard_bytes, options.max_document_bytes, earlier)
    for note in corpus.notes:
        print(note)
    if existing and existing.corpus.get("files") == corpus.record.get("files"):
        # A plan keeps its own record of omitted files; no byte of the cache depends on it.
        corpus.record.pop("left_out", None)
        if "left_out" in existing.corpus:
            corpus.record["left_out"] = existing.corpus["left_out"]
    assignments = assign(corpus.pieces)
    plan = Plan(
        task=task.name,
        corpus=corpus.record,
        vocabulary=loaded.record,
        packing=PAIRS if limits else options.packing,
        row_tokens=0 if limits else options.row_tokens or task.window_tokens,
        separator=_separator(options, task),
        shards=_shard_counts(assignments),
        pairs=limits,
        exclude=cache_lists.records(existing, lists, options.max_document_bytes, folder, spec.unit),
        filters=filters,
    )
    secret_name, module = options.hf_token_secret or "", options.task_module or ""
    return graph.Job(folder, plan, corpus, options.tokenizer, secret_name, module), assignments


def _pair_limits(options: Options, task: TaskSpec, spec: sources.CorpusSpec) -> PairLimits | None:
    reads = task.objective.unit
    if reads is not spec.unit and reads is Unit.TEXT:
        raise UserError(
            f"corpus {spec} has pairs of inputs and targets, but {task.name} reads texts: "
            "build a task NAME_supervised, or give ?column="
        )
    if reads is not spec.unit:
        raise UserError(
            f"{task.name} reads pairs, but corpus {spec} has texts: name the two sides, as in "
            f"--corpus='{spec}{'&' if '?' in str(spec) else '?'}inputs=COLUMN&targets=COLUMN'"
        )
    for unit, names in (
        (Unit.PAIR, ("max_inputs", "max_targets", "too_long")),
        (Unit.TEXT, ("row_tokens", "packing", "separator")),
    ):
        for name in names if unit is not reads else ():
            if getattr(options, name) != getattr(Options, name):
                raise UserError(
                    f"--{name} is for {unit.plural}, but {task.name} reads {reads.plural}: leave "
                    "it out"
                )
    if reads is Unit.TEXT:
        return None
    for name in ("max_inputs", "max_targets"):
        if getattr(options, name) == 1:
            raise UserError(f"--{name}=1 leaves room for EOS alone: give 2 or more")
    too_long = options.too_long or TOO_LONG[0]
    return PairLimits(options.max_inputs or 0, options.max_targets or 0, too_long)


def assign(pieces: tuple[sources.Piece, ...]) -> list[graph.Assignment]:
    """Numbers each split's shards in the order of the pieces that hold the split's documents."""
    counts: Counter[str] = Counter()
    assignments = []
    for piece in pieces:
        shards = tuple((split, counts[split]) for split in piece.splits)
        assignments.append(graph.Assignment(piece, shards))
        counts.update(piece.splits)
    return assignments


def _shard_counts(assignments: list[graph.Assignment]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for assignment in assignments:
        counts.update(split for split, _ in assignment.shards)
    return dict(sorted(counts.items()))


def _separator(options: Options, task: TaskSpec) -> str:
    return options.separator or task.objective.separator or "none"


def _kept(
    assignments: list[graph.Assignment], found: Mapping[lifecycle.ShardKey, Shard]
) -> tuple[dict[graph.Assignment, list[Shard]], list[graph.Assignment]]:
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
    job: graph.Job, assignments: list[graph.Assignment], options: Options, beam_arguments: list[str]
) -> tuple[int, dict[lifecycle.ShardKey, Shard]]:
    """Builds missing and damaged shards; returns the corpus bytes read, and all receipts."""
    found = lifecycle.settle(job.folder, job.plan, lifecycle.survey(job.folder, job.plan))
    kept, to_do = _kept(assignments, found)
    if not to_do:
        return 0, found
    if kept:
        print(f"kept {len(kept):,} finished pieces of {len(assignments):,}, {len(to_do):,} to do")
    check_writable(job.folder, job.plan.fingerprint)
    lifecycle.invalidate(job.folder, job.plan, [key for each in to_do for key in each.shards])
    if options.tokenizer == tokenize.FAST:
        loaded = vocabulary.of_cache(job.folder, job.plan.vocabulary)
        if reason := tokenize.refusal(loaded):
            print(f"all documents will be left to {loaded.codec.library}: {reason}")
    monitor = Monitor(job.folder, job.plan, kept, to_do)

    def hopeless(monitor: Monitor) -> bool:
        return bad_share(monitor.shards, monitor.unseen) > options.max_quarantined

    try:
        with monitored(monitor, files.is_remote(job.folder), hopeless):
            counts = graph.run(job, to_do, beam_arguments, options.verbose)
    except KeyboardInterrupt:
        if hopeless(monitor):
            _check_documents(monitor.shards, job.folder, options.max_quarantined)
        raise
    if options.tokenizer == tokenize.FAST:
        _report_tokenizer(job, counts)
    written = lifecycle.survey(job.folder, job.plan, check=False)
    missing = [key for key, shard in written.items() if shard is None]
    if missing:
        raise UserError(
            f"Beam reported success, but {len(missing):,} of {len(written):,} shards are missing, "
            f"first {missing[0][0]} {missing[0][1]}: run the same command to build them"
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
        reason = tokenize.Tokenizer(loaded).refusal
        print(f"all documents were left to {library}{f': {reason}' if reason else ''}")
        if counts["audited"]:
            print(f"encoded {counts['audited']:,} of them twice: no difference")
    else:
        print(
            f"tokenized {encoded:,} documents, {left:,} of them by {library}; audited "
            f"{counts['audited']:,} against it: no difference"
        )


def _check_documents(shards: list[Shard], folder: str, limit: float) -> None:
    share = bad_share(shards)
    if share > limit:
        reasons = summary.counted(shards, "dropped")
        top = ", ".join(
            f"{count:,} {reason}" for reason, count in reasons.most_common() if is_fault(reason)
        )
        raise UserError(
            f"{share:.1%} of the documents are faulty ({top}), more than --max_quarantined="
            f"{limit}: see the *.quarantine-* files in {folder}, then correct the corpus or raise "
            "the limit and run again; finished shards are kept"
        )


def _check_rows(job: graph.Job, shards: dict[lifecycle.ShardKey, Shard]) -> None:
    first = "train" if "train" in job.plan.shards else next(iter(job.plan.shards))
    if not any(shard.rows for (split, _), shard in shards.items() if split == first):
        reasons = summary.counted(list(shards.values()), "dropped").most_common(3)
        left_out = ", ".join(f"{count:,} {reason}" for reason, count in reasons)
        raise UserError(
            f"empty corpus: {job.corpus.spec} has no document with text in the split {first}"
            + (f"; left out: {left_out}" if left_out else "")
        )


def _print_estimate(
    options: Options, beam: list[str], planned: _Planned, loaded: Vocabulary, lists: list[Given]
) -> None:
    from pipeline.building import estimate

    job, assignments = planned
    existing = lifecycle.check(job.folder, job.plan, options.extend)
    found: dict[lifecycle.ShardKey, Shard] = {}
    if existing:
        surveyed = lifecycle.survey(job.folder, existing, check=False)
        found = lifecycle.settle(job.folder, existing, surveyed, write=False)
        if excludes_more(existing, job.plan):
            for key in list(cache_lists.affected(job.folder, existing, job.plan, lists, found)):
                del found[key]
    kept, to_do = _kept(assignments, found)
    pieces = [assignment.piece for assignment in to_do]
    is_local = beam[0] == "--runner=FnApiRunner"
    local_arguments = beam if is_local else ["--runner=FnApiRunner"]
    copies = cache_lists.copies(job.folder, job.plan, lists)
    expected = estimate.estimate(job, loaded, pieces, options.workers, local_arguments, copies)

    splits = list(job.plan.shards)
    rows: list[tuple[object, ...]]
    rows = [("shards", *(f"{count:,}" for count in job.plan.shards.values()))]
    for name in ("documents", "tokens", "rows"):
        rows.append((name, *(expected.counts[split][name] for split in splits)))
    rows.append(("on disk, MB", *(expected.counts[split]["disk"] / 1e6 for split in splits)))
    print(table(("", *splits), rows))
    if job.plan.filters:
        print(summary.rules_table(expected.filtered))
    size = sum(assignment.piece.bytes for assignment in assignments)
    left = sum(piece.bytes for piece in pieces)
    seconds = f" in {expected.seconds:.1f} s with --workers={options.workers}" if is_local else ""
    print(
        f"{job.folder}: {len(job.plan.corpus.get('files', [])):,} files, {size / 1e6:,.1f} MB in "
        f"{len(assignments):,} pieces, {len(kept):,} of them built; sampled "
        f"{expected.sampled / 1e6:,.1f} MB\nto do: {left / 1e6:,.1f} MB{seconds}"
    )
    if dataflow.is_runner(options.runner):
        hours = expected.core_seconds / 3600
        dollars = hours * (options.price_per_vcpu_hour or estimate.DOLLARS_PER_VCPU_HOUR)
        print(
            f"on Dataflow: {hours:,.2f} vCPU-hours, ${dollars:,.2f}, both ± "
            f"{estimate.DATAFLOW_ERROR:.0%}: measured on this machine's cores, "
            "excluding the time that workers take to start"
        )
