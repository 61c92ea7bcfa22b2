"""The cache for whoever trains by other means: grain, torch, Hugging Face's datasets.

`CacheSource` is the door itself, a split by index, all that grain and torch ask for; the functions
make of it what their libraries call a dataset. Stock seqio has tasks.seqio_tasks.
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
from tasks.cache.windows import Windows
from tasks.objectives import Lengths, noise
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError

# How many elements an IterableDataset reads at a time.
_READ_AHEAD = 64


@dataclasses.dataclass(frozen=True)
class CacheSource:
    """A split of a cache; `len()` of elements, each a dict of int32 arrays without padding.

    Without a `task` element i is window i of the cache, {"tokens"}. With one it is the example that
    the task makes of it, {"inputs", "targets"} and so on, EOS included: the very one that the
    trainer makes of window i in epoch `epoch` of a run with `seed`. Processes that are given the
    object open the cache anew.

    Attributes:
      cache: folder of a cache, local or any fsspec URL.
      task: name of a task.
      inputs, targets: lengths of the task's features; its own if None.
      window_tokens: tokens of a window; the task's or, without one, those of the cache's rows.
      keep_tails: whether a shard's unfinished last window counts, as in evaluation, or not, as in
        training.
      task_module: a user's own file with TASKS.

    Raises:
      UserError: when first read, if there is no such cache, split or task, or they do not fit.
    """

    cache: str
    split: str = "train"
    task: str | None = None
    inputs: int | None = None
    targets: int | None = None
    window_tokens: int | None = None
    keep_tails: bool = False
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
        """Returns the elements of these indices, read together."""
        tokens_WN, lengths_W = self._windows.read(indices_W)
        spec = self._spec
        if spec is None:
            return [
                {"tokens": tokens_N[:length]}
                for tokens_N, length in zip(tokens_WN, lengths_W, strict=True)
            ]
        keys_W = noise.window_keys(self.seed, spec.name, self.split, self.epoch, indices_W)
        made = spec.objective.examples(
            tokens_WN, lengths_W, keys_W, self._lengths, self._opened.ids
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
        separator = self._opened.manifest.plan.separator
        where = f"the vocabulary of {self.cache}"
        spec.check(self._lengths_of(spec), self._opened.ids, separator, where)
        return spec

    def _lengths_of(self, spec: TaskSpec) -> Lengths:
        own = spec.lengths
        return Lengths(
            own.inputs if self.inputs is None else self.inputs,
            own.targets if self.targets is None else self.targets,
        )

    @functools.cached_property
    def _lengths(self) -> Lengths:
        assert self._spec is not None
        return self._lengths_of(self._spec)

    @functools.cached_property
    def _windows(self) -> Windows:
        manifest, spec = self._opened.manifest, self._spec
        if spec is not None and self.window_tokens is not None:
            raise UserError(f"window_tokens has no effect beside task {spec.name}: set its lengths")
        if spec is not None:
            window = spec.objective.window_tokens(self._lengths)
        else:
            window = self.window_tokens or manifest.plan.row_tokens
        return Windows(self.cache, manifest, self.split, window, self.keep_tails)


def grain_dataset(source: CacheSource) -> Any:
    """A `grain.MapDataset` of the elements, in their order; `.shuffle`, `.batch`, … go on."""
    return _package("grain", "trainer").MapDataset.source(source)


def torch_dataset(source: CacheSource) -> Any:
    """A map-style `torch.utils.data.Dataset`; elements are dicts of int32 tensors."""
    torch = _package("torch", "huggingface")
    base: Any = torch.utils.data.Dataset

    class TorchDataset(base):
        def __len__(self) -> int:
            return len(source)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {name: torch.from_numpy(array) for name, array in source[index].items()}

        def __reduce__(self) -> tuple[Any, ...]:  # for the processes of a DataLoader
            return torch_dataset, (source,)

    return TorchDataset()


def iterable_dataset(source: CacheSource, shards: int = 64) -> Any:
    """A `datasets.IterableDataset` of the elements, in their order; elements are dicts of lists.

    The elements are cut into up to `shards` parts, which is how many workers can share them.
    """
    datasets = _package("datasets", "pipeline")
    count = len(source)
    borders = np.unique(np.linspace(0, count, min(shards, count) + 1).astype(np.int64)).tolist()
    parts = list(itertools.pairwise(borders))
    names = source[0].keys() if count else ()
    return datasets.IterableDataset.from_generator(
        _elements,
        features=datasets.Features(
            {name: datasets.List(datasets.Value("int32")) for name in names}
        ),
        gen_kwargs={"source": source, "parts": parts},
    )


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"this door needs {name}: pip install 'palimpsest[{extra}]'") from error


def _elements(source: CacheSource, parts: list[tuple[int, int]]) -> Iterator[dict[str, np.ndarray]]:
    for first, last in parts:
        for begin in range(first, last, _READ_AHEAD):
            yield from source.read(np.arange(begin, min(begin + _READ_AHEAD, last)))
