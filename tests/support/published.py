"""A cache whose shards a test publishes one by one, as a build finishes them."""

import dataclasses
import itertools
import pathlib
import shutil

import numpy as np
import pyarrow as pa

from pipeline.building import lifecycle
from pipeline.building.write import ShardWriter
from tasks import vocabulary
from tasks.cache.manifest import PLAN, PLAN_MARK, SHARD_KINDS, CacheManifest, PairLimits, shard_file
from tasks.cache.pack import Documents, Pairs
from tasks.cache.windows import Windows


class Published:
    """Copies a finished cache file by file into `folder`, first what a build writes first."""

    def __init__(self, source: pathlib.Path, folder: pathlib.Path, plan: bool = True):
        self.source, self.folder = source, folder
        self.manifest = CacheManifest.load(str(source))
        folder.mkdir(parents=True, exist_ok=True)
        if plan:
            self.plan()

    def plan(self) -> None:
        names = [path.name for path in self.source.glob(f"{PLAN_MARK}*")]
        for name in [*names, self.manifest.plan.vocabulary.file_name, PLAN]:
            shutil.copy(self.source / name, self.folder / f"{name}.part")
            (self.folder / f"{name}.part").rename(self.folder / name)

    def shards(self, split: str, *numbers: int) -> None:
        for number in numbers:
            for kind in SHARD_KINDS:
                path = self.source / shard_file(split, kind, number, self.count(split))
                if path.exists():
                    shutil.copy(path, self.folder / path.name)

    def count(self, split: str) -> int:
        return self.manifest.plan.shards[split]

    def finish(self) -> None:
        for path in sorted(self.source.iterdir(), key=lambda path: path.name == "COMPLETED"):
            if path.is_file() and not path.name.startswith(".lock"):
                shutil.copy(path, self.folder / path.name)


def make(folder, source, sizes, packing="concat", row_tokens=100):
    """Writes a finished cache of the tokens of the cache `source`; `sizes` are split -> shards."""
    old = CacheManifest.load(str(source))
    windows = Windows(str(source), old, "train", 1000)
    tokens = windows.read(np.arange(len(windows)))[0].reshape(-1)
    pairs = PairLimits(40, 12, "cut") if packing == "pairs" else None
    plan = dataclasses.replace(
        old.plan,
        shards={split: len(each) for split, each in sizes.items()},
        packing=packing,
        row_tokens=0 if pairs else row_tokens,
        pairs=pairs,
    )
    folder.mkdir(parents=True)
    lifecycle.begin(str(folder), plan, vocabulary.load(str(source)), extend=False)
    generator = np.random.default_rng(3)
    for split, each in sizes.items():
        for number, size in enumerate(each):
            taken, tokens = tokens[:size], tokens[size:]
            with ShardWriter(str(folder), plan, split, number) as writer:
                cuts = np.unique([0, *generator.integers(0, size + 1, size // 30), size])
                lengths = np.diff(cuts)
                names = pa.array([f"{split}-{number}-{n}" for n in range(len(lengths))])
                if not size:
                    writer.quarantine("nothing", "here", "empty")
                elif not pairs:
                    writer.add(Documents(names, taken, lengths), int(size))
                else:
                    writer.add(_pairs(names, taken, lengths), int(size))
    lifecycle.complete(str(folder), plan, lifecycle.survey(str(folder), plan))
    return folder


def _pairs(names, tokens, lengths):
    """Returns pairs of stretches of tokens, each cut into its first tokens and its next."""
    ends = np.cumsum(lengths)
    inputs = [tokens[end - size : end][:39] for end, size in zip(ends, lengths, strict=True)]
    targets = [tokens[end - min(size, 9) : end] for end, size in zip(ends, lengths, strict=True)]
    sides = ((np.concatenate(side), np.array(list(map(len, side)))) for side in (inputs, targets))
    return Pairs(names, *itertools.chain(*sides))
