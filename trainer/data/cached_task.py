"""Finds and opens a task of a run and its cache."""

import dataclasses
import functools

from tasks import registry
from tasks.cache import following
from tasks.cache.cache import Cache, find_cache
from tasks.cache.following import Following
from tasks.cache.manifest import CacheManifest, cache_names
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from tasks.vocabulary import TokenIds, Vocabulary
from trainer.config import Config, fields


@dataclasses.dataclass(frozen=True)
class CachedTask:
    """A task of a run and its cache.

    `task` has the run's settings for its objective; `cache` is the cache's folder. `following` is
    the cache while it is being built, with a growing manifest; None once it is finished.
    """

    task: TaskSpec
    cache: str
    manifest: CacheManifest
    ids: TokenIds
    following: Following | None = None

    @property
    def model(self) -> bytes:
        """Bytes of the vocabulary's model; raises a UserError if the vocabulary is unknown."""
        if not self.ids.model:
            raise UserError(
                f"the vocabulary of {self.cache} is unknown because it was adopted without one: "
                "run pipeline.adopt again with --vocabulary"
            )
        return self.ids.model

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The cache's vocabulary; raises a UserError if it is unknown."""
        return Vocabulary(self.model, self.manifest.plan.vocabulary, self.cache)


def open_cache(config: Config, name: str, patient: bool = False) -> CachedTask:
    """Opens a task's cache, or a relative's; if `patient`, waits for one being built."""
    task = _task(config, name)
    objective = fields.with_settings(
        task.objective, config.objective, "objective", f"the objective of {task.name}"
    )
    task = dataclasses.replace(task, objective=objective)
    relatives = registry.relatives(task, config.task_module)
    if config.data.follow:
        timeout = config.data.follow_timeout_seconds
        found = following.find(config.cache_dir, task.name, relatives, patient, timeout)
        if found:
            folder, state = found
            building = state if isinstance(state, Following) else None
            manifest = state.manifest if isinstance(state, Following) else state
            return CachedTask(task, folder, manifest, Cache(folder, manifest).ids, building)
    cache = Cache.open(find_cache(config.cache_dir, task.name, relatives))
    return CachedTask(task, cache.folder, cache.manifest, cache.ids)


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
