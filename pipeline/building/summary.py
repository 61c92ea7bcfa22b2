"""Reports of a build: the final table, and the next command."""

import glob
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator

from pipeline.building import graph, lifecycle, unknown
from pipeline.building.options import Options
from tasks import registry
from tasks.cache.manifest import Shard
from tasks.cache.pair_windows import longest_sides
from tasks.document_kind import SIDES
from tasks.task import TaskSpec
from tasks.terminal.programs import program
from tasks.terminal.table import table

# Device files of accelerator drivers.
_DEVICES = ("/dev/nvidia[0-9]*", "/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
# Architecture -> preset for an accelerator, and one that learns something on a CPU.
_PRESETS = {
    "encoder": ("bert_base", "bert_mini"),
    "encoder_decoder": ("t5_1_1_small", "t5_1_1_mini"),
    "decoder": ("lm_small", "llama_mini"),
}
# A GPU with 8 GB holds an eighth of T5's batch of 128 rows.
_ON_ACCELERATOR = ("--microbatches=8", "--model.dtype=bfloat16")
# A CPU makes about two updates with this many positions per second, in less than 4 GB.
_CPU_POSITIONS = 8192
_CPU_STEPS = 2000
# Less text takes less time than starting, and the first time compiling: its speed means nothing.
_MEASURED_MEGABYTES = 50


def show(
    options: Options,
    job: graph.Job,
    shards: dict[lifecycle.ShardKey, Shard],
    read_bytes: int,
    seconds: float,
    advise: bool,
) -> None:
    """Prints what a build wrote and omitted, its speed and, if `advise`, the next command."""
    plan = job.plan
    columns = {
        split: [shards[split, index] for index in range(count)]
        for split, count in plan.shards.items()
    }
    print(table(("", *columns), list(_rows(list(columns.values())))))
    held_out = any(shard.rows for shard in columns.get("validation", ()))
    megabytes = read_bytes / 1e6
    speed = f", {megabytes / seconds:.1f} MB/s" if megabytes >= _MEASURED_MEGABYTES else ""
    print(f"{job.folder}: read {megabytes:,.1f} MB in {seconds:.1f} s{speed}")
    if advise:
        task = registry.get(plan.task, options.task_module)
        longest = longest_sides([shard for of in columns.values() for shard in of])
        print(f"next: {next_command(task, options, held_out, longest)}")
    if not held_out:
        print(
            f"{plan.task} has no validation split, as no document was held out: to evaluate the "
            "model, build into another --cache_dir with a larger share in --corpus, such as "
            "?validation=0.1"
        )


def _rows(columns: list[list[Shard]]) -> Iterator[tuple[str, ...]]:
    def row(name: str, cells: Iterable[float], form: str = ",.0f") -> tuple[str, ...]:
        return (name, *(format(cell, form) for cell in cells))

    def totals(field: str) -> list[int]:
        return [sum(getattr(shard, field) or 0 for shard in shards) for shards in columns]

    def of_pairs(field: str) -> list[list[int]]:
        return [[getattr(shard.pairs, field) for shard in shards] for shards in columns]

    text, tokens = totals("text_bytes"), totals("text_tokens")
    disk = [sum(file.bytes for each in of for file in each.files.values()) for of in columns]
    for field in ("documents", "tokens", "rows"):
        yield row(field, totals(field))
    yield row("text, MB", (size / 1e6 for size in text), ",.2f")
    ratios = (size / max(count, 1) for size, count in zip(text, tokens, strict=True))
    yield row("bytes per token", ratios, ".2f")
    every = [shard for shards in columns for shard in shards]
    for column in unknown.columns(every):
        found = [unknown.shares(of, column) for of in columns]
        of = "" if column == "text" else f", {column}"
        for what, values in (
            (f"unknown tokens{of}", [each.tokens for each in found]),
            (f"text in them{of}", [each.bytes for each in found]),
        ):
            if any(values):
                yield row(what, values, ".2%")
    yield row("on disk, MB", (size / 1e6 for size in disk), ",.2f")
    if any(shard.pairs for shard in every):
        for side in SIDES:
            yield row(f"longest {side}", map(max, of_pairs(f"longest_{side}")))
            cut = list(map(sum, of_pairs(f"cut_{side}")))
            if any(cut):
                yield row(f"cut {side}", cut)
        if any(split := totals("split_documents")):
            yield row("split pairs", split)
    for name, field in (("left out", "dropped"), ("edited", "edits")):
        counts = [counted(shards, field) for shards in columns]
        for what in sorted(counted(every, field)):
            yield row(f"{name}: {what}", [each[what] for each in counts])


def counted(shards: list[Shard], field: str) -> Counter[str]:
    """Returns the shards' summed counts in a field, "dropped" or "edits"."""
    return sum((Counter(getattr(shard, field)) for shard in shards), Counter())


def next_command(
    task: TaskSpec, options: Options, held_out: bool, longest: tuple[int, int] = (0, 0)
) -> str:
    """Returns a trainer.pretrain command for this machine.

    Args:
      held_out: whether text was held out.
      longest: the largest numbers of input and target ids of a pair, without EOS; 0 for texts.
    """
    on_accelerator, on_cpu = _PRESETS[task.objective.architectures[0]]
    if "prefix" in task.objective.features:
        on_cpu = "mini_primer_ez"  # Llama has no bidirectional prefixes
    wants_cpu = os.environ.get("JAX_PLATFORMS", "") == "cpu"
    if not wants_cpu and any(map(glob.glob, _DEVICES)):
        preset, size = on_accelerator, _ON_ACCELERATOR
    else:
        rows = max(1, _CPU_POSITIONS // (task.lengths.inputs + task.lengths.targets))
        rows = 1 << (rows.bit_length() - 1)
        preset, size = on_cpu, (f"--batch_size={rows}", f"--train_steps={_CPU_STEPS}")
    arguments = [
        f"--preset={preset}",
        f"--task={task.name}",
        f"--cache_dir={options.cache_dir}",
        "--model_dir=model",
        *size,
        *(
            f"--lengths.{side}={most + 1}"
            for side, most in zip(SIDES, longest, strict=True)
            if most and most >= getattr(task.lengths, side)
        ),
        *([] if held_out else ["--evaluation.every_steps=0"]),
        *([f"--task_module={options.task_module}"] if options.task_module else []),
    ]
    return f"{program('trainer.pretrain')} {shlex.join(arguments)}"
