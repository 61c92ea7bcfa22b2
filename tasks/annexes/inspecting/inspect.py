"""Shows windows of a cache and the examples made from them.

palimpsest inspect --cache=DIR [--task=NAME] [--windows=5 | --index=17,18]
"""

import dataclasses

import numpy as np

from tasks import registry
from tasks.annexes.inspecting import show
from tasks.annexes.inspecting.trace import trace
from tasks.cache.cache import Cache
from tasks.cache.lineage import Lineage
from tasks.cache.pair_windows import check_kind, open_windows, row_windows
from tasks.objectives import Lengths, noise
from tasks.reading.corpus import readable
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, Rule, at_least, field
from tasks.vocabulary import TokenIds


def samples(
    cache: Cache,
    split: str,
    task: TaskSpec | None,
    lengths: Lengths,
    indices: list[int] | int,
    seed: int = 0,
    epoch: int = 0,
) -> list[show.Sample]:
    """Returns windows of a split and the examples that `task` makes from them.

    Windows and noise are as in a run with these lengths and seed: in training epoch `epoch` (from
    0) for the training split, in evaluation for any other. Without a task, windows are the cache's
    rows. `indices` lists windows, or is the number of windows to draw with `seed`.
    """
    folder, manifest = cache.folder, cache.manifest
    if task:
        check_kind(folder, manifest, task.objective)
        where = f"the vocabulary of {folder}"
        task.check(lengths, cache.ids, manifest.plan.separator, where)
    # Training leaves out the unfinished last window; evaluation reads it.
    keep_tails = split != "train" or task is None
    if task:  # show what fits
        objective = task.objective.cutting_sides()
        task = dataclasses.replace(task, objective=objective)
        windows = open_windows(folder, manifest, split, objective, lengths, keep_tails=keep_tails)
    else:
        windows = row_windows(folder, manifest, split, keep_tails=keep_tails)
    width = windows.window_tokens
    lineage = Lineage(folder, manifest, split)
    count = len(windows)
    if not count:
        raise UserError(f"{folder} has no window of {width:,} tokens in {split}")
    if isinstance(indices, int):
        generator = np.random.default_rng(seed % 2**64)
        indices = sorted(generator.choice(count, min(indices, count), replace=False).tolist())
    for index in indices:
        if not 0 <= index < count:
            raise UserError(
                f"--index={index}: {split} has {count:,} windows of {width:,} tokens, "
                f"numbered 0 to {count - 1:,}"
            )

    def sample(index: int) -> show.Sample:
        places = windows.where(index)
        tokens_WN, lengths_W = windows.read(np.array([index]))
        tokens_N = tokens_WN[0, : int(lengths_W[0])]
        facts = [("cache", folder), ("split", f"{split}, {count:,} windows")]
        found = None
        if task:
            key = noise.window_keys(seed, task.name, split, epoch, np.array([index]))[0]
            found = trace(task.objective, tokens_N, key, lengths, cache.ids)
            facts += [
                ("task", task.name),
                ("objective", task.objective.describe(key)),
                ("noise", f"seed {seed}, {f'epoch {epoch}' if split == 'train' else 'evaluation'}"),
                *show.features(found),
            ]
        return show.Sample(
            title=f"Window {index:,}",
            facts=tuple(facts),
            places=places,
            parts=lineage.parts(places),
            corpus=readable(str(manifest.plan.corpus["spec"])),
            tokens=tokens_N,
            trace=found,
            lengths=lengths,
            unit=lineage.unit,
        )

    return [sample(index) for index in indices]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cache: str = field(REQUIRED, "folder of the cache, CACHE_DIR/TASK", metavar="DIR", bare=True)
    task: str | None = field(
        None, "task whose examples to show; None: the cache's own, or only rows if that is unknown"
    )
    task_module: str | None = field(
        None, "Python module with a tuple TASKS of further tasks", metavar="MODULE"
    )
    inputs: int | None = field(
        None, "length of inputs, in tokens; None: the task's", rule=at_least(1)
    )
    targets: int | None = field(
        None, "length of targets, in tokens; None: the task's", rule=at_least(1)
    )
    split: str = field("train", "split of the cache: train or validation")
    windows: int = field(5, "number of windows to draw", rule=at_least(1))
    index: tuple[int, ...] | None = field(
        None,
        "indices of the windows to show instead of drawing some, such as 17,18",
        metavar="I,J",
        rule=Rule("one index or more", bool),
    )
    seed: int = field(0, "seed of the draw, and of the run whose noise is shown")
    epoch: int = field(
        0,
        "epoch of the run whose noise is shown, from 0; evaluation splits have the same noise in "
        "every epoch",
        rule=at_least(0),
    )
    output: str | None = field(
        None, "HTML page to write instead of printing", metavar="FILE", aliases=("html",)
    )


def shown(flags: Flags) -> tuple[str, list[show.Sample], TokenIds]:
    """Returns the name of the task, the windows that the flags choose, and the vocabulary's ids."""
    cache = Cache.open(flags.cache)
    if flags.task:
        task: TaskSpec | None = registry.get(flags.task, flags.task_module)
    else:
        task = registry.find(cache.manifest.plan.task, flags.task_module)
    if task is None and (flags.inputs, flags.targets, flags.epoch) != (None, None, Flags.epoch):
        raise UserError(
            f"{flags.cache} names no known task, so its rows have no --inputs, --targets and "
            "--epoch: name one with --task"
        )
    own = task.lengths if task else Lengths(0, 0)
    lengths = Lengths(
        own.inputs if flags.inputs is None else flags.inputs,
        own.targets if flags.targets is None else flags.targets,
    )
    chosen = flags.windows if flags.index is None else list(flags.index)
    made = samples(cache, flags.split, task, lengths, chosen, flags.seed, flags.epoch)
    return task.name if task else cache.manifest.plan.task, made, cache.ids


def run(flags: Flags) -> None:
    """Prints or writes the windows."""
    name, made, ids = shown(flags)
    if not flags.output:
        show.print_samples(made, ids)
        return
    title = f"{name}: windows of {flags.split}"
    files.write_bytes(flags.output, show.page(title, made, ids).encode())
    print(f"{flags.output}: {len(made)} windows")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
