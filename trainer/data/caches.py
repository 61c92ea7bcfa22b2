"""How a run opens its caches and orders their windows; an annex may read unfinished caches."""

import dataclasses
from collections.abc import Callable, Sequence

from tasks.cache import subset
from tasks.cache.manifest import CacheManifest
from tasks.cache.subset import Take
from tasks.cache.windows import Windows
from tasks.mixture import MixtureSpec
from tasks.objectives import Lengths
from trainer.config import Config
from trainer.data import cached_task
from trainer.data.batches import BatchMaker
from trainer.data.cached_task import CachedTask
from trainer.data.order import Epochs, Order, Reading

TRAIN = "train"


class Caches:
    """Finished caches: all shards of all splits are known."""

    knows_sizes = True
    # How evaluations read more shards of a split, if they do not read all.
    more_shards = ""

    def __init__(self, config: Config):
        self.config = config

    def check(self, mixtures: Sequence[MixtureSpec]) -> None:
        """Raises a UserError for settings of the run that these caches do not allow."""

    def check_task(self, each: CachedTask, lengths: Lengths, wanted: Take | None) -> None:
        """Raises a UserError for a task that they do not allow; `lengths` are an example's."""

    def open(self, name: str, patient: bool = False) -> CachedTask:
        """Opens a task's cache, or a relative's; if `patient`, may wait for it."""
        return cached_task.opened(self.config, name)

    def reading(
        self,
        each: CachedTask,
        open_as: Callable[..., BatchMaker],
        wanted: Take | None,
        seed: int,
        order: Callable[[Windows], Order],
    ) -> tuple[BatchMaker, Reading]:
        """Opens a training split; returns (its maker, the order of its windows).

        `open_as` takes a manifest that lists only some of the cache's shards.
        """
        maker = open_as()
        if wanted:
            count = subset.count(maker.windows, each.cache, each.manifest, TRAIN, wanted)
            maker.windows.keep_first(count)
        return maker, Epochs(len(maker.windows), order(maker.windows))

    def as_it_was(self, each: CachedTask, earlier: CacheManifest) -> CachedTask:
        """Returns a task with an earlier state of its cache."""
        return dataclasses.replace(each, manifest=earlier, building=None)

    def evaluated(self, each: CachedTask, split: str, training: bool) -> CacheManifest:
        """Returns the manifest of the shards that evaluations read."""
        return each.manifest

    def first_shards(self, training: bool) -> int | None:
        """Returns how many leading shards of a split evaluations read; None means all."""
        return None

    def lines(self, each: CachedTask, known: int | None) -> list[tuple[str, str]]:
        """Returns (subject, text) lines about a cache; `known` shards, None: all."""
        return []

    def close(self, each: CachedTask) -> None:
        """Ends threads that wait for the cache."""


def caches_of(config: Config) -> Caches:
    """Returns how a run opens its caches."""
    return next(iter(config.entries("caches")), Caches)(config)
