"""Shows windows of a cache, and what an objective makes of them.

python -m pipeline.inspect --cache=DIR [--task=NAME] [--windows=5 | --index=17,18] [--html=FILE]
"""

import numpy as np

from tasks import registry
from tasks.cache.lineage import Lineage
from tasks.cache.manifest import VOCABULARY, CacheManifest
from tasks.cache.windows import Windows
from tasks.inspection import show
from tasks.inspection.trace import trace
from tasks.objectives import Lengths, noise
from tasks.storage import files
from tasks.task import TaskSpec
from tasks.terminal.command_line import Parser, UserError, positive, run
from tasks.vocabulary import TokenIds


def samples(
    folder: str,
    manifest: CacheManifest,
    ids: TokenIds,
    split: str,
    task: TaskSpec | None,
    lengths: Lengths,
    indices: list[int] | int,
    seed: int,
    epoch: int,
) -> list[show.Sample]:
    """Returns windows of a split with what `task` makes of them, rows of the cache without one.

    Windows are those of a run with these lengths; `indices` names them, or says how many are to be
    drawn by `seed`. Noise is that of a run with this seed in this epoch.

    Raises:
      UserError: there is no such split or window, or the task cannot work on the cache.
    """
    plan = manifest.plan
    if task:
        task.check(lengths, ids, plan.separator, f"the vocabulary of {folder}")
    width = task.objective.window_tokens(lengths) if task else plan.row_tokens
    # Training leaves out the unfinished window of a shard; evaluation has it.
    keep_tails = split != "train" or task is None
    windows = Windows(folder, manifest, split, width, keep_tails)
    lineage = Lineage(folder, manifest, split)
    count = len(windows)
    if not count:
        raise UserError(f"{folder} has no window of {width:,} tokens in {split}")
    if isinstance(indices, int):
        generator = np.random.default_rng(seed)
        indices = sorted(generator.choice(count, min(indices, count), replace=False).tolist())
    made = []
    for index in indices:
        if not 0 <= index < count:
            raise UserError(f"--index={index}: {split} has windows 0 to {count - 1:,} of {width:,}")
        place = windows.where(index)
        tokens_WN, lengths_W = windows.read(np.array([index]))
        tokens_N = tokens_WN[0, : int(lengths_W[0])]
        facts = [("cache", folder), ("split", f"{split}, {count:,} windows")]
        found = None
        if task:
            of_task = noise.task_seed(seed, task.name)
            key = noise.fold_in(noise.fold_in(of_task, epoch), index)
            found = trace(task.objective, tokens_N, key, lengths, ids)
            facts += [
                ("task", task.name),
                ("objective", show.describe(task.objective, key)),
                ("noise", f"seed {seed}, epoch {epoch}"),
                *show.features(found),
            ]
        made.append(
            show.Sample(
                title=f"Window {index:,}",
                facts=tuple(facts),
                place=place,
                parts=lineage.parts(place),
                corpus=str(plan.corpus["spec"]),
                tokens=tokens_N,
                trace=found,
                lengths=lengths,
            )
        )
    return made


def _task(flags, manifest: CacheManifest) -> TaskSpec | None:
    if flags.task:
        return registry.get(flags.task, flags.task_module)
    return registry.tasks(flags.task_module).get(manifest.plan.task)


def _indices(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str]) -> None:
    """The command."""
    parser = Parser(prog="python -m pipeline.inspect", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--cache", required=True, help="the cache's folder: CACHE_DIR/TASK")
    add("--task", help="whose objective to show (default: the cache's; rows if it is not known)")
    add("--task_module", help="a module of your own with a TASKS tuple")
    add("--inputs", type=positive, help="positions of the inputs (default: the task's)")
    add("--targets", type=positive, help="positions of the targets (default: the task's)")
    add("--split", default="train", help="train, validation …")
    add("--windows", type=positive, default=5, help="how many to show, drawn by --seed")
    add("--index", type=_indices, help="the windows to show: 17,18")
    add("--seed", type=int, default=0, help="of the draw, and of the run whose noise to show")
    add("--epoch", type=int, default=0, help="of that run")
    add("--html", help="write this page instead")
    flags = parser.parse_args(argv)

    manifest = CacheManifest.load(flags.cache)
    task = _task(flags, manifest)
    given = task.lengths if task else Lengths(0, 0)
    lengths = Lengths(
        given.inputs if flags.inputs is None else flags.inputs,
        given.targets if flags.targets is None else flags.targets,
    )
    record = manifest.plan.vocabulary
    model = files.read_bytes(files.join(flags.cache, VOCABULARY))
    ids = TokenIds(record.size, record.sentinels, model)
    chosen = flags.index or flags.windows
    made = samples(
        flags.cache, manifest, ids, flags.split, task, lengths, chosen, flags.seed, flags.epoch
    )
    if not flags.html:
        show.print_samples(made, ids)
        return
    name = task.name if task else manifest.plan.task
    title = f"{name}: windows of {flags.split}"
    files.write_bytes(flags.html, show.page(title, made, ids).encode())
    print(f"{flags.html}: {len(made)} windows")


if __name__ == "__main__":
    run(main)
