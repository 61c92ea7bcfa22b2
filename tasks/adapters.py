"""Reads a cache from grain and Hugging Face's datasets.

`CacheSource` gives random access to a split, which is all that grain needs; the functions convert
it to each library's dataset type. For seqio, see trainer.annexes.seqio_tasks.catalogue, and for
batches in any trainer, trainer.reading.
"""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks import registry
from tasks.cache.cache import Cache
from tasks.cache.pair_windows import open_windows, row_windows
from tasks.cache.windows import Windows
from tasks.objectives import noise
from tasks.task import TaskSpec
from tasks.terminal import extras
from tasks.terminal.command_line import UserError

__all__ = ["CacheSource", "grain_dataset", "iterable_dataset"]

# Number of elements that an IterableDataset reads at a time.
_READ_AHEAD = 64


@dataclasses.dataclass(frozen=True)
class CacheSource:
    """A split of a cache: a sequence of elements, each a dict of int32 arrays without padding.

    Without a `task`, element i is window i of the cache, {"tokens"}. With a task, it is the example
    of that window, {"inputs", "targets"} and so on, EOS included, as the trainer makes it in a run
    with `seed`: in epoch `epoch` of the training split, or in the evaluation of other splits.
    Processes that receive the object open the cache themselves.

    Attributes:
      cache: folder of a cache, local or any fsspec URL.
      split: "train", "validation", ….
      task: name of a task; None for windows.
      inputs, targets: lengths of the task's features; the task's defaults if None.
      window_tokens: tokens per window, without a task; the cache's `row_tokens` if None.
      keep_tails: whether to include the unfinished last window, as evaluation does.
      across_shards: whether windows cross shard borders; seqio's do not.
      seed: seed of the run.
      epoch: epoch of the run, from 0, for the training split.
      task_module: your own Python module with TASKS.

    Raises UserError at the first read if the cache, split or task is unknown, or the cache does not
    serve the task.
    """

    cache: str
    split: str = "train"
    task: str | None = None
    inputs: int | None = None
    targets: int | None = None
    window_tokens: int | None = None
    keep_tails: bool = False
    across_shards: bool = True
    seed: int = 0
    epoch: int = 0
    task_module: str | None = None

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        index = int(index)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.cache} has {len(self):,} windows in {self.split}, not {index}")
        return self.read(np.array([index]))[0]

    def read(self, indices_W: np.ndarray) -> list[dict[str, np.ndarray]]:
        tokens_WN, lengths_W = self._windows.read(indices_W)
        spec, made = self._spec, {"tokens": (tokens_WN, lengths_W)}
        if spec is not None:
            keys_W = noise.window_keys(self.seed, spec.name, self.split, self.epoch, indices_W)
            made = spec.objective.examples(
                tokens_WN, lengths_W, keys_W, spec.lengths, self._opened.ids
            )
        return [
            {
                name: values_WN[row, : int(sizes_W[row])].astype(np.int32)
                for name, (values_WN, sizes_W) in made.items()
            }
            for row in range(len(indices_W))
        ]

    def __getstate__(self) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(self)}
        return {name: value for name, value in self.__dict__.items() if name in names}

    def __repr__(self) -> str:
        return f"CacheSource({self.cache}, {self.split}, {self.task or 'windows'})"

    @functools.cached_property
    def _opened(self) -> Cache:
        return Cache.open(self.cache)

    @functools.cached_property
    def _spec(self) -> TaskSpec | None:
        if self.task is None:
            return None
        spec = registry.get(self.task, self.task_module)
        given = {name: getattr(self, name) for name in ("inputs", "targets")}
        given = {name: length for name, length in given.items() if length is not None}
        spec = dataclasses.replace(spec, lengths=dataclasses.replace(spec.lengths, **given))
        separator = self._opened.manifest.plan.separator
        spec.check(spec.lengths, self._opened.ids, separator, f"the vocabulary of {self.cache}")
        return spec

    @functools.cached_property
    def _windows(self) -> Windows:
        manifest, spec = self._opened.manifest, self._spec
        if spec is not None and self.window_tokens is not None:
            raise UserError(
                f"window_tokens has no effect with task {spec.name}: set inputs and targets"
            )
        reading: dict[str, Any]
        reading = {"keep_tails": self.keep_tails, "across_shards": self.across_shards}
        if spec is not None:
            return open_windows(
                self.cache, manifest, self.split, spec.objective, spec.lengths, **reading
            )
        if self.window_tokens is None:
            return row_windows(self.cache, manifest, self.split, **reading)
        return Windows(self.cache, manifest, self.split, self.window_tokens, **reading)


def grain_dataset(source: CacheSource) -> Any:
    """Returns a `grain.MapDataset` of the elements, in order."""
    return _package("grain", "trainer").MapDataset.source(source)


def iterable_dataset(source: CacheSource, shards: int = 64) -> Any:
    """Returns a `datasets.IterableDataset` of the elements, in order; elements are dicts of lists.

    It has at most `shards` parts, which workers can share.
    """
    datasets = _package("datasets", "pipeline")
    count = len(source)
    borders = np.unique(np.linspace(0, count, min(shards, count) + 1).astype(np.int64)).tolist()
    parts = list(itertools.pairwise(borders))
    names = source[0].keys() if count else ()
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in names})
    return datasets.IterableDataset.from_generator(
        _elements, features=features, gen_kwargs={"source": source, "parts": parts}
    )


def _package(name: str, extra: str) -> Any:
    with extras.needed("this adapter", extra):
        return importlib.import_module(name)


def _elements(source: CacheSource, parts: list[tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
    for first, last in parts:
        for begin in range(first, last, _READ_AHEAD):
            yield from source.read(np.arange(begin, min(begin + _READ_AHEAD, last)))
