"""The (subject, text) lines about a run's data, printed when it starts."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from tasks.cache import subset
from tasks.cache.pair_windows import PairWindows
from tasks.cache.subset import Take
from tasks.document_kind import DocumentKind
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import as_flag
from tasks.terminal.table import table
from trainer.config import Config, DataConfig
from trainer.config.phases import Phases
from trainer.config.skips import described
from trainer.data.batches import Source
from trainer.data.cached_task import CachedTask
from trainer.data.caches import Caches
from trainer.data.features import Batch, filling

Line = tuple[str, str]

# Share of unread tokens at which to warn.
_MANY_UNREAD = 0.01
# Below this fill of any side, a batch gets advice on lengths.
WASTEFUL = 0.9


def task_lines(
    source: Source,
    task: CachedTask,
    lengths: Lengths,
    rows: Lengths,
    caches: Caches,
    amounts: Mapping[str, Take],
) -> Iterator[Line]:
    """Yields lines about a task's examples (of `lengths`, in `rows`) and cache, and warnings."""
    reading = caches.config.data
    plan, objective, windows = task.manifest.plan, source.maker.objective, source.maker.windows
    read = (
        "a pair"
        if objective.unit is DocumentKind.PAIR
        else f"{windows.window_tokens} corpus tokens"
    )
    yield "task", f"{source.task}: {read} -> inputs {lengths.inputs}, targets {lengths.targets}"
    needed, ids = objective.sentinels(lengths), task.ids
    yield "sentinels", f"{needed} needed, {ids.sentinels} in the vocabulary of {ids.size} ids"
    yield from caches.lines(task, None if source.whole else windows.shards)
    if not source.whole:
        return
    count, tokens = len(windows), task.manifest.total("train", "tokens")
    if source.packed:
        each = f"{count / source.packed.rows_per_epoch:.2f} examples a row"
        yield "rows", f"{each} of inputs {rows.inputs}, targets {rows.targets}"
    law = f", law {plan.law} of SentencePiece" if plan.sentencepiece_law else ""
    yield "cache", f"{task.cache}: {tokens:,} tokens, {count:,} windows, {plan.packing}{law}"
    if wanted := subset.of_task(amounts, source.task):
        yield (
            "take",
            f"{wanted}: each epoch reads the first {count:,} windows, {windows.taken_share:.2%} of "
            f"the cache, {round(count * windows.mean_tokens):,} tokens",
        )
    if unread := windows.unread_tokens:
        many = unread / tokens >= _MANY_UNREAD
        rest = "" if windows.per_outer == 1 else " and what the longest rows leave"
        yield (
            "warning" if many else "",
            f"{unread:,} tokens ({unread / tokens:.2%}) of {tokens:,} are not read: the unfinished "
            f"last window{rest}{'; use more text or shorter lengths' if many else ''}",
        )
    pairs, cut = windows.cut() if isinstance(windows, PairWindows) else (0, 0)
    if pairs:
        yield (
            "warning",
            f"{pairs:,} of {count:,} pairs cut to these lengths: {cut:,} tokens "
            f"({cut / tokens:.2%}) are not read",
        )
    copied = files.is_remote(task.cache) and reading.shuffle == "global"
    if copied and windows.bytes > reading.local_bytes:
        yield (
            "warning",
            f"{windows.bytes:,} bytes are read in global order, but local copies may take "
            f"only {reading.local_bytes:,}, so shards are copied again and again: set "
            "--data.local_bytes, or --data.shuffle=block",
        )


def law_lines(tasks: Sequence[CachedTask]) -> Iterator[Line]:
    """Warns if caches of one vocabulary were encoded by several laws of SentencePiece."""
    caches = {
        task.manifest.plan.law: task.cache for task in tasks if not task.manifest.plan.adopted
    }
    if len(caches) > 1:
        by = " and ".join(f"{cache} by law {law}" for law, cache in sorted(caches.items()))
        yield (
            "warning",
            f"--sentencepiece_law differs: {by}; where segmentations nearly tie, the same text has "
            "other ids",
        )


def mixture_lines(sources: list[Source], shares: list[float], rows_read: int) -> list[Line]:
    """Returns a table of a mixture's tasks, with shares and epochs at the first update's rates."""
    total = sum(len(source.maker.windows) for source in sources)
    rows = []
    for source, share in zip(sources, shares, strict=True):
        count, read = len(source.maker.windows), rows_read * share
        epochs = f"{read / source.layout.rows_per_epoch:,.2f}"
        shown = (f"{count:,}", f"{count / total:.4%}", f"{share:.4%}", f"{read:,.0f}", epochs)
        rows.append((source.task, *shown))
    header = ("task", "windows", "of all windows", "of the rows", "rows", "epochs")
    first, *others = table(header, rows).splitlines()
    return [("mixture", first), *(("", line) for line in others)]


def change_line(step: int, shares: dict[str, float]) -> Line:
    """Describes the mixture after its rates change at `step` updates."""
    listed = ", ".join(f"{task} {share:.4%}" for task, share in shares.items())
    return "", f"from update {step + 1:,} on: {listed}"


def skip_lines(reading: DataConfig) -> Iterator[Line]:
    """Yields a line about the batches that are left out, if there are any."""
    skips = reading.skips
    for first, following in skips.ranges:
        update = skips.updates(first - 1) + 1
        yield (
            "skip",
            f"--data.skip={as_flag(reading.skip)} leaves out {described([(first, following)])}: "
            f"update {update:,} reads batch {skips.batch(update):,}; epochs below count them",
        )


def batch_line(sources: list[Source], batch_size: int, shares: list[float], rows_read: int) -> Line:
    """Describes the first batch and, for a single task, how often its corpus is read."""
    if not all(source.whole for source in sources):
        return "batch", f"{batch_size} rows; epochs are unknown until the caches are finished"
    tokens = batch_size * sum(
        source.tokens_a_row * share for source, share in zip(sources, shares, strict=True)
    )
    text = f"{batch_size} rows, {tokens:,.0f} corpus tokens a step"
    if len(sources) == 1:
        epoch = sources[0].layout.rows_per_epoch
        text += f", {epoch / batch_size:,.1f} steps an epoch"
        text += f", {rows_read / epoch:,.2f} epochs in all" * bool(rows_read)
    return "batch", text


def phase_lines(phases: Phases, updates: int) -> Iterator[Line]:
    """Yields a line for each change of the batch's rows or lengths in a run of `updates`."""
    # Of several that a skip moves to one update, only the last takes effect.
    changes = {phases.skips.updates(phase.begin): phase for phase in phases.phases[1:]}
    for before, phase in changes.items():
        lengths = ""
        if before >= updates:
            later = f"before its schedule's change at {before + 1:,}"
            yield "warning", f"the run ends at update {updates:,}, {later}"
            continue
        if phases.nest:
            lengths = f" of inputs {phase.lengths.inputs}, targets {phase.lengths.targets}"
        tokens = f"after {phases.in_tokens.read(before):,} tokens"
        yield "", f"from update {before + 1:,} on, {tokens}: {phase.rows:,} rows a batch{lengths}"


def check_nest(config: Config, tasks: Sequence[CachedTask], caches: Caches) -> None:
    """Raises a UserError for what cannot be read with lengths that change."""
    flag, phases, reading = "--length_schedule", config.phases, config.data
    if phases.nest not in [phase.lengths for phase in phases.phases]:
        raise UserError(f"{flag}: one phase must have both the longest inputs and targets")
    for name, is_set in (
        ("follow", not caches.knows_sizes),
        ("data.take", reading.take is not None),
        ("data.pack_examples", reading.pack_examples),
        ("data.shuffle=block", reading.shuffle == "block"),
        ("mixing.max_epochs", config.mixing.max_epochs is not None),
    ):
        if is_set:
            raise UserError(f"{flag} cannot be combined with --{name}: leave out one of the two")
    for cached in tasks:
        if cached.task.objective.unit is DocumentKind.PAIR or cached.manifest.plan.rows_are_windows:
            raise UserError(
                f"{flag}: the rows of {cached.cache} are windows, so that no other length can be "
                "cut from them: build it with --packing=concat"
            )


def packing_line(batch: Batch, tasks: list[TaskSpec], lengths: Lengths) -> Line:
    """Says how full a batch is and, for a single task, which lengths waste less."""
    text = packing(batch)
    if len(tasks) == 1 and min(filling(batch).values()) < WASTEFUL:
        text += better_lengths(tasks[0], lengths)
    return "packing", text


def packing(batch: Batch) -> str:
    """Returns how full a batch is: "inputs 100.0% full, targets 99.8% full"."""
    shares = filling(batch).items()
    return ", ".join(f"{name.removesuffix('_full')} {share:.1%} full" for name, share in shares)


def better_lengths(task: TaskSpec, lengths: Lengths) -> str:
    """Returns advice on lengths that leave less padding; "" if there are none."""

    def window(inputs: int, targets: int) -> int:
        try:
            return task.objective.window_tokens(Lengths(inputs, targets))
        except UserError:
            return 0

    advice = []
    now = window(lengths.inputs, lengths.targets)
    shorter = _first(lambda n: window(lengths.inputs, n) >= now, 1, lengths.targets)
    if shorter < lengths.targets:
        advice.append(f"--lengths.targets={shorter} holds the same text")
    if lengths.inputs:
        # Inputs for these targets; more than 64 times as long is never useful.
        most = 64 * lengths.inputs
        too_long = _first(lambda n: not window(n, lengths.targets), lengths.inputs, most)
        if lengths.inputs < too_long - 1 < most - 1:
            advice.append(f"--lengths.inputs={too_long - 1} fills these targets")
    return f" (padding: {', or '.join(advice)})" if advice else ""


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the lowest number from `low` to `high` for which `holds` is true, else `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
