"""A finished cache: its folder, its manifest and its vocabulary."""

import dataclasses
import functools
from collections.abc import Collection

from tasks import vocabulary
from tasks.cache.manifest import MANIFEST, CacheManifest, cache_names
from tasks.storage import files
from tasks.terminal.command_line import UserError, nearest
from tasks.vocabulary import TokenIds


class NoCache(UserError):
    """A task has no cache where it is looked for."""


@dataclasses.dataclass(frozen=True)
class Cache:
    """An opened cache."""

    folder: str
    manifest: CacheManifest

    @classmethod
    def open(cls, folder: str) -> "Cache":
        """Reads the manifest in `folder`; raises UserError if there is no finished cache."""
        return cls(folder, CacheManifest.load(folder))

    @functools.cached_property
    def ids(self) -> TokenIds:
        """The vocabulary of the rows; raises UserError if its file is missing or differs."""
        record = self.manifest.plan.vocabulary
        if not record.sha256:  # unknown at adoption
            return record.ids(b"")
        command = "adopt" if self.manifest.plan.adopted else "build"
        return vocabulary.of_cache(self.folder, record, command).ids


def find_cache(cache_dir: str, task: str, relatives: Collection[str] = ()) -> str:
    """Returns the folder of the cache that serves `task` under `cache_dir`.

    That is `cache_dir` itself if it holds a manifest, else `cache_dir/task`, else the only cache
    under `cache_dir` of a task in `relatives`, the tasks on the same corpus. Raises UserError if
    there is none, listing the caches under `cache_dir`.
    """
    if files.exists(files.join(cache_dir, MANIFEST)):
        return cache_dir
    folder = files.join(cache_dir, task)
    # A cache of 20,000 shards has 80,000 files: list them only if there is no manifest.
    if files.exists(files.join(folder, MANIFEST)):
        return folder
    if files.exists(folder) and files.list_names(folder):
        return folder
    others = cache_names(cache_dir)
    serving = [name for name in others if name in relatives]
    if len(serving) == 1:
        return files.join(cache_dir, serving[0])
    found = "build it with pipeline.build, or use --cache_dir to name the folder that contains it"
    if others:
        found = f"it holds {', '.join(others)}; name one with --cache_dir to use its rows"
    raise NoCache(f"no cache for task {task}{nearest(task, others)} under {cache_dir}: {found}")
