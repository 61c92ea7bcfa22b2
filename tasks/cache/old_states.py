"""Earlier states of a cache, kept to explain older runs after a takedown.

A takedown rewrites the shards that hold a document and shifts later windows of the split. For every
earlier state, the cache keeps the manifest and the lineage of rewritten shards, without tokens, in
a folder named after the plan's fingerprint. The manifest of an unfinished state (a run may follow a
build, and a takedown may be killed) has the first shards of each split.
"""

from collections.abc import Sequence

from tasks.cache.manifest import MANIFEST, CacheManifest, Plan, Shard, shard_file
from tasks.cache.receipts import finished
from tasks.storage import files
from tasks.terminal.command_line import UserError

BEFORE = ".before-"


def folder_of(cache: str, fingerprint: str) -> str:
    return files.join(cache, BEFORE + fingerprint[:16])


def keep(cache: str, plan: Plan, shards: Sequence[tuple[str, int]]) -> None:
    """Keeps a cache's state before its plan changes and finished `shards` are redone."""
    now = _state(cache, plan)
    if not shards and not _finished(now):
        return  # no run has read anything
    folder = folder_of(cache, plan.fingerprint)
    files.make_folder(folder)
    files.remove_partial(folder)  # of a takedown that was killed
    for split, index in shards:
        name = shard_file(split, "documents", index, plan.shards[split])
        files.copy(files.join(cache, name), files.join(folder, name))
    before = _kept(folder)
    # A kill may leave fewer finished shards than before.
    if before is None or _finished(now) > _finished(before):
        files.write_bytes(files.join(folder, MANIFEST), now.content())


def _state(cache: str, plan: Plan) -> CacheManifest:
    """Returns the manifest of a cache, or of the first finished shards of each split."""
    try:
        return CacheManifest.load(cache)
    except UserError:
        sizes = files.list_sizes(cache)
    splits: dict[str, list[Shard]] = {split: [] for split in plan.shards}
    for split, shards in splits.items():
        for index in range(plan.shards[split]):
            if not (shard := finished(cache, plan, split, index, sizes)):
                break
            shards.append(shard)
    return CacheManifest(plan, splits, {})


def _finished(manifest: CacheManifest) -> int:
    return sum(map(len, manifest.splits.values()))


def _kept(folder: str) -> CacheManifest | None:
    there = files.exists(files.join(folder, MANIFEST))
    return CacheManifest.load(folder, check=False) if there else None


def load(cache: str, fingerprint: str) -> CacheManifest:
    """Returns the manifest of an earlier state, possibly partial; raises UserError if not kept."""
    folder = folder_of(cache, fingerprint)
    manifest = _kept(folder)
    if manifest is None:
        raise UserError(
            f"{cache} has changed since the run, and keeps no record of that state: restore the "
            "cache that the run was trained on"
        )
    return CacheManifest.load(folder) if is_whole(manifest) else manifest


def is_whole(manifest: CacheManifest) -> bool:
    """Returns whether a manifest has all shards of its plan."""
    return all(len(manifest.splits[split]) == of for split, of in manifest.plan.shards.items())


def lineage_paths(cache: str, manifest: CacheManifest, split: str, fingerprint: str) -> list[str]:
    """Returns the lineage files of a split's shards in the state of `fingerprint` and `manifest`.

    A shard's lineage is in the folder of the first state, from this one on, whose takedown rewrote
    the shard, else in the cache. Raises UserError if it was not kept.
    """
    names = [
        shard_file(split, "documents", index, manifest.plan.shards[split])
        for index in range(len(manifest.splits[split]))
    ]
    paths = {name: files.join(cache, name) for name in names}
    states = _states_from(cache, fingerprint)
    for state in reversed(states):
        for name in set(files.list_names(state)) & set(names):
            paths[name] = files.join(state, name)
    sizes = files.list_sizes(cache) if states else {}
    for name, shard in zip(names, manifest.splits[split], strict=True):
        unchanged = sizes.get(name, shard.files[name].bytes) == shard.files[name].bytes
        if paths[name] == files.join(cache, name) and not unchanged:
            raise UserError(
                f"{paths[name]} has changed since the run, and no copy was kept: restore the "
                "cache that the run was trained on"
            )
    return [paths[name] for name in names]


def _states_from(cache: str, fingerprint: str) -> list[str]:
    """Returns the folders of the states from `fingerprint` on, in order of their exclude lists."""
    names = [name for name in files.list_names(cache) if name.startswith(BEFORE)]
    kept = {folder: _kept(folder) for folder in (files.join(cache, name) for name in names)}
    states = {folder: len(each.plan.exclude or ()) for folder, each in kept.items() if each}
    folders = sorted(states, key=lambda folder: (states[folder], folder))
    first = folder_of(cache, fingerprint)
    return folders[folders.index(first) :] if first in folders else []
