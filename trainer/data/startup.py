"""The (subject, text) lines about a run's data, printed when it starts."""

from collections.abc import Mapping

from tasks.cache import subset
from tasks.cache.manifest import CacheManifest
from tasks.cache.pair_windows import PairWindows
from tasks.cache.subset import Take
from tasks.objectives import Lengths
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.table import table
from tasks.unit import Unit
from trainer.config import DataConfig
from trainer.data.batches import Source
from trainer.data.features import Batch, filling
from trainer.data.padding import WASTEFUL, better_lengths, packing

Line = tuple[str, str]

# Share of unread tokens at which to warn.
_MANY_UNREAD = 0.01


def task_line(source: Source, lengths: Lengths) -> Line:
    """Describes the examples of a task."""
    window = source.maker.windows.window_tokens
    read = f"{window} corpus tokens"
    if source.maker.objective.unit is Unit.PAIR:
        read = "a pair"
    text = f"{read} -> inputs {lengths.inputs}, targets {lengths.targets}"
    return "task", f"{source.task}: {text}"


def rows_lines(source: Source, lengths: Lengths) -> list[Line]:
    """Describes packed rows: how many examples share one, and how full rows are."""
    layout = source.packed
    if layout is None:
        return []
    windows, rows = len(source.maker.windows), layout.rows_per_epoch
    text = (
        f"{windows / rows:.2f} examples a row of inputs {lengths.inputs}, targets {lengths.targets}"
    )
    return [("rows", text)]


def sentinels_line(source: Source, lengths: Lengths) -> Line:
    """Compares the sentinels that a task needs with the vocabulary's."""
    ids, needed = source.maker.ids, source.maker.objective.sentinels(lengths)
    text = f"{needed} needed, {ids.sentinels} in the vocabulary of {ids.size} ids"
    return "sentinels", text


def cache_line(source: Source, folder: str, manifest: CacheManifest) -> Line:
    """Describes the cache of a task."""
    tokens, windows = manifest.total("train", "tokens"), len(source.maker.windows)
    text = f"{folder}: {tokens:,} tokens, {windows:,} windows, {manifest.plan.packing}"
    return "cache", text


def follow_lines(
    source: Source, folder: str, manifest: CacheManifest, reading: DataConfig
) -> list[Line]:
    """Says how a run follows the build of a cache."""
    if not reading.follow:
        return []
    shards, known = manifest.plan.shards["train"], source.maker.windows.shards
    done = "all" if source.whole else f"{known:,}"
    text = (
        f"{folder}: the first epoch reads its {shards:,} shards in the order of the plan, "
        f"{reading.follow_shards:,} at a time, of which {done} are read in; it waits where it "
        f"overtakes the build; evaluations read the first {reading.follow_shards:,} shards of "
        "their split"
    )
    return [("follow", text)]


def take_lines(source: Source, amounts: Mapping[str, Take]) -> list[Line]:
    """Says which part of a task's cache is read, if not all of it."""
    wanted, windows = subset.of_task(amounts, source.task), source.maker.windows
    if wanted is None:
        return []
    tokens = round(len(windows) * windows.mean_tokens)
    text = (
        f"{wanted}: the first {len(windows):,} windows, {tokens:,} tokens, "
        f"{windows.taken_share:.2%} of the cache, are what every epoch reads"
    )
    return [("take", text)]


def unread_lines(source: Source, manifest: CacheManifest) -> list[Line]:
    """Counts the tokens that no epoch reads; warns if they are many."""
    unread, tokens = source.maker.windows.unread_tokens, manifest.total("train", "tokens")
    if not unread:
        return []
    text = (
        f"{unread:,} tokens ({unread / tokens:.2%}) of {tokens:,} are not read: the unfinished "
        "last window"
    )
    if unread / tokens < _MANY_UNREAD:
        return [("", text)]
    return [("warning", f"{text}; use more text or shorter lengths")]


def cut_lines(source: Source, manifest: CacheManifest) -> list[Line]:
    """Warns of pairs with a cut side, and counts their unread tokens."""
    windows = source.maker.windows
    if not isinstance(windows, PairWindows):
        return []
    pairs, cut = windows.cut()
    if not pairs:
        return []
    tokens = manifest.total("train", "tokens")
    return [
        (
            "warning",
            f"{pairs:,} pairs of {len(windows):,} are cut to these lengths: {cut:,} tokens "
            f"({cut / tokens:.2%}) are not read",
        )
    ]


def copies_lines(source: Source, folder: str, reading: DataConfig) -> list[Line]:
    """Warns if the local copies of a remote cache are too small for the global order."""
    size = source.maker.windows.bytes
    if not files.is_remote(folder) or reading.shuffle != "global" or size <= reading.local_bytes:
        return []
    text = (
        f"{size:,} bytes are read in global order, and local copies may take "
        f"{reading.local_bytes:,}, so shards are copied again and again: set --data.local_bytes, "
        "or --data.shuffle=block"
    )
    return [("warning", text)]


def mixture_lines(
    sources: list[Source], shares: list[float], batch_size: int, train_steps: int
) -> list[Line]:
    """Returns a table of a mixture's tasks: windows, shares of the rows, epochs.

    Shares are those at the first update; epochs assume that they do not change.
    """
    windows = [len(source.maker.windows) for source in sources]
    rows = []
    for source, count, share in zip(sources, windows, shares, strict=True):
        read = batch_size * train_steps * share
        rows.append(
            (
                source.task,
                f"{count:,}",
                f"{count / sum(windows):.4%}",
                f"{share:.4%}",
                f"{read:,.0f}",
                f"{read / source.layout.rows_per_epoch:,.2f}",
            )
        )
    header = ("task", "windows", "of all windows", "of the rows", "rows", "epochs")
    first, *others = table(header, rows).splitlines()
    return [("mixture", first), *(("", line) for line in others)]


def change_line(step: int, shares: dict[str, float]) -> Line:
    """Describes the mixture after a change of its rates at `step` updates."""
    listed = ", ".join(f"{task} {share:.4%}" for task, share in shares.items())
    return "", f"from update {step + 1:,} on: {listed}"


def batch_line(
    sources: list[Source], batch_size: int, shares: list[float], train_steps: int
) -> Line:
    """Describes the batch and, for a single task, how often its corpus is read."""
    if not all(source.whole for source in sources):
        return "batch", f"{batch_size} rows; epochs are known when the caches are finished"
    tokens = sum(
        source.maker.windows.mean_tokens
        * (len(source.maker.windows) / source.layout.rows_per_epoch)
        * batch_size
        * share
        for source, share in zip(sources, shares, strict=True)
    )
    text = f"{batch_size} rows, {tokens:,.0f} corpus tokens a step"
    if len(sources) == 1:
        epoch = _steps_per_epoch(sources[0], batch_size, 1.0)
        text += f", {epoch:,.1f} steps an epoch, {train_steps / epoch:,.2f} epochs in all"
    return "batch", text


def packing_line(batch: Batch, tasks: list[TaskSpec], lengths: Lengths) -> Line:
    """Says how full a batch is and, for a single task, which lengths waste less."""
    text = packing(batch)
    if len(tasks) == 1 and min(filling(batch).values()) < WASTEFUL:
        text += better_lengths(tasks[0], lengths)
    return "packing", text


def _steps_per_epoch(source: Source, batch_size: int, share: float) -> float:
    return source.layout.rows_per_epoch / (batch_size * share) if share else float("inf")
