"""Finds and opens a task of a run and its cache."""

import dataclasses
import functools
from typing import Any

from tasks import registry
from tasks.cache.cache import Cache, find_cache
from tasks.cache.manifest import CacheManifest, cache_names
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds, Vocabulary
from trainer.config import Config, field_paths


@dataclasses.dataclass(frozen=True)
class CachedTask:
    """A task of a run and its cache.

    `task` has the run's settings for its objective; `cache` is the cache's folder. `building` is
    what an annex knows of a cache that is not finished, whose manifest grows.
    """

    task: TaskSpec
    cache: str
    manifest: CacheManifest
    ids: TokenIds
    building: Any = None

    @property
    def model(self) -> bytes:
        """Bytes of the vocabulary's model; raises a UserError if the vocabulary is unknown."""
        if not self.ids.model:
            raise UserError(
                f"the vocabulary of {self.cache} is unknown because it was adopted without one: "
                "adopt it again with --vocabulary"
            )
        return self.ids.model

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The cache's vocabulary; raises a UserError if it is unknown."""
        return Vocabulary(self.model, self.manifest.plan.vocabulary, self.cache)


def opened(config: Config, name: str) -> CachedTask:
    """Opens a task's finished cache, or a relative's."""
    task, relatives = found(config, name)
    cache = Cache.open(find_cache(config.cache_dir, task.name, relatives))
    return CachedTask(task, cache.folder, cache.manifest, cache.ids)


def found(config: Config, name: str) -> tuple[TaskSpec, set[str]]:
    """Returns (a task with the run's settings for its objective, tasks whose caches serve it)."""
    task = _task(config, name)
    objective = field_paths.with_settings(
        task.objective, config.objective, "objective", f"the objective of {task.name}"
    )
    task = dataclasses.replace(task, objective=objective)
    return task, registry.relatives(task, config.task_module)


def _task(config: Config, name: str) -> TaskSpec:
    """Returns the task `name`; the error for an unknown one lists the existing caches."""
    try:
        return registry.get(name, config.task_module)
    except UserError as error:
        built = cache_names(config.cache_dir)
        meant = [each for each in built if each.startswith(f"{name}_")] or built
        if not meant:
            raise
        raise UserError(
            f"--task={name}: no such task; {config.cache_dir} has caches of {', '.join(meant)}"
        ) from error
