"""Plans builds: task, corpus, exclude lists, and the shards of each piece."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from pipeline.building import graph, lifecycle
from pipeline.building.options import Options
from pipeline.exclusion import cache_lists, origins, targets
from pipeline.exclusion.lists import Given
from pipeline.runners import secret
from pipeline.tokenizer import spelling, tokenize
from tasks import registry, vocabulary
from tasks.cache.manifest import KEEP, PAIRS, QUARANTINE, TOO_LONG, PairLimits, Plan, Spelling
from tasks.document_kind import DocumentKind
from tasks.reading import sources
from tasks.storage import files
from tasks.task import OBJECTIVES, TaskSpec, objective_of
from tasks.terminal.command_line import UserError, nearest
from tasks.vocabularies.sentencepiece_model import NEW_LAW, OLD_LAW
from tasks.vocabulary import Vocabulary


@dataclasses.dataclass(frozen=True)
class Checked:
    """A build whose options agree with each other."""

    options: Options
    task: TaskSpec
    spec: sources.CorpusSpec
    vocabulary: Vocabulary
    limits: PairLimits | None

    @property
    def folder(self) -> str:
        return files.join(self.options.cache_dir, self.task.name)


@dataclasses.dataclass(frozen=True)
class Planned:
    """A build with all pieces and their shards; `lists` are those that were given to it."""

    of: Checked
    job: graph.Job
    assignments: list[graph.Assignment]
    lists: list[Given]

    @property
    def earlier(self) -> list[dict[str, int]]:
        """The number of shards in each split before each extension."""
        found, before = [], set[str]()
        for generation in self.job.plan.generations[:-1]:
            before.update(generation)
            some = [each for each in self.assignments if each.piece.parts[0].file.name in before]
            found.append(_shard_counts(some))
        return found


def checked(options: Options) -> Checked:
    """Raises a UserError for options that do not go together, without a look at the corpus."""
    task = _task(options)
    spec = _spec(options, task)
    if options.hf_token_secret:
        if spec.kind != "hf":
            raise UserError("--hf_token_secret is for corpora from the Hugging Face Hub")
        secret.provide_hf_token(options.hf_token_secret)
    loaded = vocabulary.load(options.vocabulary, options.extra_ids)
    where = f"the vocabulary {options.vocabulary}"
    task.check(task.lengths, loaded.ids, _separator(options, task), where)
    _check_law(options, loaded)
    limits = _pair_limits(options, task, spec)
    if choice := _spelling(options):
        spelling.check(loaded, choice, limits is not None)
    return Checked(options, task, spec, loaded, limits)


@dataclasses.dataclass(frozen=True)
class Listed:
    """A build whose corpus is listed, and the plan of its folder, if there is one."""

    of: Checked
    corpus: sources.Corpus
    existing: Plan | None

    @property
    def target(self) -> targets.Target:
        in_force = (self.existing.exclude if self.existing else None) or ()
        return targets.Target(origins.of_corpus(self.corpus), self.corpus.record, in_force)


def listed(of: Checked) -> Listed:
    """Lists the corpus, with the files of an existing cache first."""
    existing = lifecycle.planned(of.folder)
    if existing:
        sources.check_record(of.folder, existing.corpus)
    earlier = existing.generations if existing else []
    options = of.options
    how = {"rules": existing.corpus["rules"]} if existing and "rules" in existing.corpus else {}
    corpus = sources.resolve(
        of.spec, options.shard_bytes, options.max_document_bytes, earlier, **how
    )
    for note in corpus.notes:
        print(note, file=options.notes)
    if existing and existing.corpus.get("files") == corpus.record.get("files"):
        # A plan keeps its own record of omitted files; no byte of the cache depends on it.
        corpus.record.pop("left_out", None)
        if "left_out" in existing.corpus:
            corpus.record["left_out"] = existing.corpus["left_out"]
    return Listed(of, corpus, existing)


def planned(each: Listed, lists: Sequence[Given]) -> Planned:
    """Returns the plan; `lists` is what `targets.fitted` returned for this corpus."""
    of, options, corpus = each.of, each.of.options, each.corpus
    task = of.task
    flags = getattr(options, "filters", None)  # of an annex
    given = flags.filter if flags else ()
    filters = given and graph.filtering("resolve")(given, options.task_module, of.spec.unit)
    assignments = assign(corpus.pieces)
    exclude = cache_lists.records(each.existing, lists, options.max_document_bytes, of.folder)
    plan = Plan(
        task=task.name,
        corpus=corpus.record,
        vocabulary=of.vocabulary.record,
        packing=PAIRS if of.limits else options.packing,
        row_tokens=0 if of.limits else options.row_tokens or task.window_tokens,
        separator=_separator(options, task),
        shards=_shard_counts(assignments),
        pairs=of.limits,
        exclude=exclude,
        filters=filters or None,
        spelling=_spelling(options),
        sentencepiece_law=None if options.sentencepiece_law == OLD_LAW else NEW_LAW,
    )
    secret_name, module = options.hf_token_secret or "", options.task_module or ""
    job = graph.Job(of.folder, plan, corpus, options.tokenizer, secret_name, module)
    return Planned(of, job, assignments, list(lists))


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


def _pair_limits(options: Options, task: TaskSpec, spec: sources.CorpusSpec) -> PairLimits | None:
    reads = task.objective.unit
    if reads is not spec.unit and reads is DocumentKind.TEXT:
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
        (DocumentKind.PAIR, ("max_inputs", "max_targets", "too_long", "empty_targets")),
        (DocumentKind.TEXT, ("row_tokens", "packing", "separator")),
    ):
        for name in names if unit is not reads else ():
            if getattr(options, name) != getattr(Options, name):
                raise UserError(
                    f"--{name} is for {unit.plural}, but {task.name} reads {reads.plural}: leave "
                    "it out"
                )
    if reads is DocumentKind.TEXT:
        return None
    for name in ("max_inputs", "max_targets"):
        if getattr(options, name) == 1:
            raise UserError(f"--{name}=1 leaves room for EOS alone: give 2 or more")
    too_long = options.too_long or TOO_LONG[0]
    empty = KEEP if options.empty_targets == KEEP else None
    return PairLimits(options.max_inputs or 0, options.max_targets or 0, too_long, empty)


def _spelling(options: Options) -> Spelling | None:
    chosen = Spelling(options.sentinels, options.special_tokens)
    return None if chosen == Spelling(QUARANTINE, QUARANTINE) else chosen


def _check_law(options: Options, loaded: Vocabulary) -> None:
    law = options.sentencepiece_law
    if law != OLD_LAW and not loaded.is_unigram:
        raise UserError(
            f"--sentencepiece_law={law} has no effect: {options.vocabulary} is not a unigram model "
            "of SentencePiece, and only those have other ids in other releases"
        )
    if options.tokenizer != tokenize.FAST:
        tokenize.check_law(loaded, law, options.tokenizer)


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
