"""The cache's folder over its life: claimed, planned, surveyed, completed; never half trusted.

plan.json   first: what every byte below follows from
shards      in any order, each vouched for by its receipt
info, stats, manifest.json, COMPLETED   last, in this order: the trainer trusts a manifest,
            stock seqio a COMPLETED, and both go before a shard is redone

An extension is a plan with more files: COMPLETED and the manifest go, plan.json is replaced, the
shards that are there get the names of the larger number, then the build goes on as any other.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from pipeline.building.write import finished
from tasks.cache.manifest import (
    MANIFEST,
    PLAN,
    SHARD_KINDS,
    CacheManifest,
    Plan,
    Shard,
    plan_from_dict,
    shard_file,
    shard_from_dict,
)
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VOCABULARY, Vocabulary

COMPLETED = "COMPLETED"
# What seqio compares to learn how integers were stored. Source: seqio `dataset_providers.py`,
# _CachedDataSource.
_SEQIO_VERSION = "0.0.20"
_PACKAGES = ("apache-beam", "numpy", "pyarrow", "sentencepiece")

ShardKey = tuple[str, int]


@contextlib.contextmanager
def claim(folder: str) -> Iterator[None]:
    """Makes the folder, holds it for this build, and clears what killed builds left half written.

    The lock is advisory and this machine's; elsewhere two builds of one plan write equal bytes
    under atomic names, so the worst is work done twice.

    Raises:
      UserError: another build holds it.
      OSError: it cannot be written.
    """
    files.make_folder(folder)
    if files.is_remote(folder):
        yield
        return
    path = files.local_path(folder)
    with tempfile.TemporaryFile(dir=path, prefix=files.PARTIAL):
        pass  # finds out now, not at the first shard, that nothing can be written here
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another build is writing {folder}: wait for it, or choose another --cache_dir"
            ) from error
        files.remove_partial(folder)
        yield
    finally:
        os.close(descriptor)


def planned(folder: str) -> Plan | None:
    """Returns the plan of the cache in `folder`, None where there is none.

    It is that of plan.json or, where that is damaged or gone, of the manifest.

    Raises:
      UserError: there is a plan.json and it cannot be read, and no manifest.
    """
    path = files.join(folder, PLAN)
    try:
        return plan_from_dict(files.read_json(path))
    except FileNotFoundError:
        finished = files.exists(files.join(folder, MANIFEST))
        return CacheManifest.load(folder).plan if finished else None
    except UserError:
        if not files.exists(files.join(folder, MANIFEST)):
            raise
        return CacheManifest.load(folder).plan


def check(folder: str, plan: Plan, extend: bool) -> Plan | None:
    """Returns the plan that is there, equal or to be extended; None where there is none.

    Raises:
      UserError: the folder holds another cache, or something else.
    """
    there = planned(folder)
    ours = plan_from_dict(json.loads(json.dumps(dataclasses.asdict(plan))))
    if there is None:
        others = [name for name in files.list_names(folder) if not name.startswith(".")]
        if others:
            raise UserError(
                f"{folder} holds {others[0]}, and no {PLAN}: it is not a cache of ours; choose "
                "another --cache_dir"
            )
    elif ours.difference(there):
        if _manifest_has(folder, ours):
            return ours
        _check_extends(folder, there, ours, extend)
    return there


def begin(folder: str, plan: Plan, vocabulary: Vocabulary, extend: bool) -> None:
    """Writes plan.json and the vocabulary, or finds that they are there and equal.

    `extend`: whether a plan that is there may be followed by one with more files.

    Raises:
      UserError: the folder holds another cache, or something else; nothing is touched.
    """
    there = check(folder, plan, extend)
    if there and plan.difference(there):
        distrust(folder, plan)
    text = as_json(dataclasses.asdict(plan))
    if not _holds(files.join(folder, PLAN), text):
        files.write_bytes(files.join(folder, PLAN), text)
    copy = files.join(folder, VOCABULARY)
    if not files.exists(copy) or files.sha256(copy) != plan.vocabulary.sha256:
        files.write_bytes(copy, vocabulary.model)


def _manifest_has(folder: str, plan: Plan) -> bool:
    """Whether the manifest is of this plan, so that a plan.json that differs must be damaged."""
    try:
        return not plan.difference(CacheManifest.load(folder).plan)
    except UserError:
        return False


def _check_extends(folder: str, there: Plan, ours: Plan, extend: bool) -> None:
    """Raises a UserError unless our plan is theirs with a generation of files more."""
    old, new = there.corpus.get("files", []), ours.corpus.get("files", [])
    differences = _without_files(ours).difference(_without_files(there))
    added = len(ours.generations) - len(there.generations)
    follows = added == 1 and new[: len(old)] == old
    if not differences and follows and extend:
        return
    if not differences and follows:
        raise UserError(
            f"{folder} holds a cache of {len(old):,} files of this corpus, which now has "
            f"{len(new):,}: add --extend, and the new ones become further shards beside those"
        )
    if extend and not differences:
        now = {file["name"]: file for file in new}
        changed = [file["name"] for file in old if now.get(file["name"]) != file]
        differences = [f"{name} has changed or is gone" for name in changed]
    differences = differences or ours.difference(there)
    raise UserError(
        f"{folder} holds a cache of another plan ({'; '.join(differences[:3])}): choose "
        "another --cache_dir, or use the flags it was built with"
    )


def _without_files(plan: Plan) -> Plan:
    """The plan less what an extension may change."""
    kept = {key: plan.corpus[key] for key in plan.corpus.keys() - {"files", "generations"}}
    if "files" in plan.corpus:
        spec = sources.parse(kept["spec"])
        location = spec.location if spec.kind == "hf" else "files"  # or another pattern for them
        kept["spec"] = str(dataclasses.replace(spec, location=location, revision=""))
        kept["revision"] = ""
    return dataclasses.replace(plan, corpus=kept, shards={})


def renumber(folder: str, plan: Plan, earlier: dict[str, int]) -> None:
    """Gives the shards of an earlier generation, `earlier` by split, the names they have in `plan`.

    A name says how many shards there are, as stock seqio expects. The old receipt vouches for the
    files under either name and goes last, so a kill between any two steps leaves this to be called
    again. Files that no receipt vouches for are deleted; their shards are to do.
    """
    names = set(files.list_names(folder))
    for split, count in earlier.items():
        for index in range(count if count != plan.shards[split] else 0):
            new = {
                shard_file(split, kind, index, count): shard_file(
                    split, kind, index, plan.shards[split]
                )
                for kind in SHARD_KINDS
            }
            *data, receipt = new
            if receipt in names and (shard := _receipt(files.join(folder, receipt))):
                for name in names.intersection(data):
                    files.rename(files.join(folder, name), files.join(folder, new[name]))
                entries = {new[name]: entry for name, entry in shard.files.items()}
                renamed = dataclasses.replace(shard, files=entries)
                path = files.join(folder, new[receipt])
                files.write_json(path, dataclasses.asdict(renamed))
            for name in names.intersection(new):
                files.remove(files.join(folder, name))


def _receipt(path: str) -> Shard | None:
    try:
        return shard_from_dict(files.read_json(path))
    except (UserError, KeyError, TypeError, AttributeError):
        return None


def survey(folder: str, plan: Plan, check: bool = True) -> dict[ShardKey, Shard | None]:
    """Returns every shard of the plan: (split, number) -> its receipt, None where it is to do.

    `check` holds the files against the receipts: see pipeline.building.write.finished.
    """
    keys = [(split, index) for split, count in plan.shards.items() for index in range(count)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(
            zip(
                keys,
                pool.map(lambda key: finished(folder, plan, key[0], key[1], check), keys),
                strict=True,
            )
        )


def distrust(folder: str, plan: Plan, keys: Iterable[ShardKey] = ()) -> None:
    """Takes back what says that the cache is finished, and what vouches for the shards `keys`."""
    files.remove(files.join(folder, COMPLETED))
    files.remove(files.join(folder, MANIFEST))
    for split, index in keys:
        files.remove(files.join(folder, shard_file(split, "receipt", index, plan.shards[split])))


def complete(folder: str, plan: Plan, shards: dict[ShardKey, Shard]) -> bool:
    """Writes the files that make the shards a cache; returns False if all were there already."""
    splits = {
        split: tuple(shards[split, index] for index in range(count))
        for split, count in plan.shards.items()
    }
    wanted = closing_files(_keep_software(folder, CacheManifest(plan, splits, _software())))
    stale = [name for name, data in wanted.items() if not _holds(files.join(folder, name), data)]
    if stale:
        distrust(folder, plan)
        for name, data in wanted.items():
            files.write_bytes(files.join(folder, name), data)
    return bool(stale)


def closing_files(manifest: CacheManifest) -> dict[str, bytes]:
    """Returns the files that make shards a cache, in the order in which they are written."""
    splits = manifest.splits
    return {
        **{f"info.{split}.json": as_json(_seqio_info(len(splits[split]))) for split in splits},
        **{f"stats.{split}.json": as_json(_seqio_stats(splits[split])) for split in splits},
        MANIFEST: as_json(dataclasses.asdict(manifest)),
        COMPLETED: b"tfrecord",
    }


def _holds(path: str, data: bytes) -> bool:
    return files.exists(path) and files.read_bytes(path) == data


def as_json(value: object) -> bytes:
    """Returns the bytes that files.write_json writes."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def _software() -> dict[str, str]:
    versions = {package: metadata.version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **versions}


def _keep_software(folder: str, manifest: CacheManifest) -> CacheManifest:
    """A finished cache stays as it is when only the software here is newer."""
    try:
        there = CacheManifest.load(folder)
    except UserError:
        return manifest
    kept = dataclasses.replace(manifest, software=there.software)
    return (
        kept
        if as_json(dataclasses.asdict(there)) == as_json(dataclasses.asdict(kept))
        else manifest
    )


def _seqio_info(shards: int) -> dict[str, object]:
    """Source: seqio `beam_utils.py`, GetInfo."""
    feature = {"dtype": "int32", "shape": [None]}
    return {
        "features": {"document_starts": feature, "targets": feature},
        "num_shards": shards,
        "seqio_version": _SEQIO_VERSION,
    }


def _seqio_stats(shards: Iterable[Shard]) -> dict[str, int]:
    """Source: seqio `beam_utils.py`, GetStats: output features alone, padding and EOS left out."""
    shards = list(shards)
    return {
        "examples": sum(shard.rows for shard in shards),
        "targets_max_tokens": max(shard.longest_row for shard in shards),
        "targets_tokens": sum(shard.text_tokens for shard in shards),
    }
