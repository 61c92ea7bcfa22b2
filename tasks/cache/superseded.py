"""Earlier states of a cache: what a takedown changed, kept so that older runs can be explained.

A takedown writes the shards anew that hold a document, and later windows of the split move. Which
steps of an older run saw a document follows from the old manifest and the old lineage. Of every
state that a takedown ended, the cache keeps, in a folder named by the fingerprint of its plan, the
manifest and the lineage of the shards that were written anew; the other shards are still the same.
No token is kept, and ids are.
"""

from collections.abc import Iterable

from tasks.cache.manifest import MANIFEST, CacheManifest, Plan, shard_file
from tasks.storage import files
from tasks.terminal.command_line import UserError

BEFORE = ".before-"


def folder_of(cache: str, fingerprint: str) -> str:
    """Returns the folder for a state of a cache, by the fingerprint of its plan."""
    return files.join(cache, BEFORE + fingerprint[:16])


def keep(cache: str, plan: Plan, shards: Iterable[tuple[str, int]]) -> None:
    """Keeps the state of a cache before some shards are written anew.

    Of an unfinished cache, which no run has seen, nothing is kept. May be repeated after a kill.
    """
    try:
        manifest = CacheManifest.load(cache)
    except UserError:
        return
    folder = folder_of(cache, plan.fingerprint)
    files.make_folder(folder)
    for split, index in shards:
        name = shard_file(split, "documents", index, plan.shards[split])
        files.copy(files.join(cache, name), files.join(folder, name))
    files.write_bytes(files.join(folder, MANIFEST), manifest.content())


def load(cache: str, fingerprint: str) -> CacheManifest:
    """Returns the manifest of an earlier state.

    Raises:
      UserError: the cache never was in that state, or does not know it.
    """
    folder = folder_of(cache, fingerprint)
    if not files.exists(files.join(folder, MANIFEST)):
        raise UserError(
            f"{cache} has changed since the run, and keeps no record of that state: restore the "
            "cache that the run was trained on"
        )
    return CacheManifest.load(folder)


def lineage_paths(cache: str, manifest: CacheManifest, split: str, fingerprint: str) -> list[str]:
    """Returns the lineage files of all shards of a split in the state of a fingerprint.

    `manifest` is that of the state. A shard's lineage is in the folder of the first state, from
    this one on, whose takedown wrote it anew, else in the cache.
    """
    names = [
        shard_file(split, "documents", index, manifest.plan.shards[split])
        for index in range(len(manifest.splits[split]))
    ]
    paths = {name: files.join(cache, name) for name in names}
    for state in reversed(_states_from(cache, fingerprint)):
        for name in set(files.list_names(state)) & set(names):
            paths[name] = files.join(state, name)
    return [paths[name] for name in names]


def _states_from(cache: str, fingerprint: str) -> list[str]:
    """Returns the folders of the states from one on, in order: each has one more list or more."""
    states = []
    for name in files.list_names(cache):
        if name.startswith(BEFORE):
            folder = files.join(cache, name)
            if files.exists(files.join(folder, MANIFEST)):
                lists = CacheManifest.load(folder, check=False).plan.exclude or ()
                states.append((len(lists), folder))
    states.sort()
    folders = [folder for _, folder in states]
    first = folder_of(cache, fingerprint)
    return folders[folders.index(first) :] if first in folders else []
