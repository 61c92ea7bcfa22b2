"""Verifies a cache: that its shards and other files are sound, and that no document repeats."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.exclusion.lists import Given, copy_name
from pipeline.verification.absence import Absence, Sought
from pipeline.verification.shard import FINISH, Checked, Fault, ShardChecker
from tasks import annexes, vocabulary
from tasks.cache import old_states
from tasks.cache.manifest import (
    MANIFEST,
    PLAN,
    PLAN_MARK,
    CacheManifest,
    Plan,
    Shard,
    as_json,
    shard_file,
)
from tasks.storage import files
from tasks.storage.lock import LOCK
from tasks.terminal import processes
from tasks.terminal.command_line import UserError

# Document digests are sorted in parts of about this many bytes, in three times as much memory.
# 2**32 documents, a hundred web crawls, make 1,024 parts.
_DIGEST_BYTES = 64 << 20
# Shards per message to a worker process: checking a small one takes less time than a message.
_CHUNK = 16


class Verified(NamedTuple):
    """Contents by split, ordered faults (none in a valid cache), and proofs for the given lists."""

    splits: dict[str, Checked]
    faults: list[Fault]
    absences: list[Absence]


def verify(folder: str, workers: int = 1, exclude: Sequence[Given] = ()) -> Verified:
    """Checks a cache; `exclude` are lists, besides its own, whose documents must be absent."""
    if not files.exists(files.join(folder, MANIFEST)) and files.exists(files.join(folder, PLAN)):
        fault = Fault(MANIFEST, "missing: the cache is not finished", FINISH)
        return Verified({}, [fault], [])
    try:
        manifest = CacheManifest.load(folder, check=False)
    except UserError as error:
        if not files.exists(files.join(folder, MANIFEST)):
            raise
        return Verified({}, [Fault(MANIFEST, str(error), FINISH)], [])
    if manifest.plan.adopted:
        if exclude:
            raise UserError(f"{folder} is another program's cache, which records no documents")
        faults = _of_adopted("shared")(folder, manifest)
    else:
        faults = _check_shared_files(folder, manifest, set(files.list_names(folder)))
    own, of_lists = _own_lists(folder, manifest.plan)
    faults += of_lists
    jobs = [
        (split, index, shard)
        for split, shards in manifest.splits.items()
        for index, shard in enumerate(shards)
    ]
    splits = {split: Checked([]) for split in manifest.splits}
    sizes = [sum(entry.bytes for entry in shard.files.values()) for _, _, shard in jobs]
    with tempfile.TemporaryDirectory() as scratch:
        sought = Sought(own, exclude, manifest.plan, scratch)
        digests = _Digests(scratch, sum(shard.documents for _, _, shard in jobs))
        workers = workers if sum(sizes) > processes.SMALL_BYTES else 1
        of_worker = folder, manifest.plan, (own, sought.more)
        results = processes.in_order(
            *("verifying", _checker, of_worker, jobs, sizes, workers, _CHUNK),
            note=lambda: f"{len(faults)} faults",
        )
        for (split, *_), checked in zip(jobs, results, strict=True):
            total = splits[split]
            for field in ("size", "rows", "tokens", "documents", "dropped"):
                setattr(total, field, getattr(total, field) + getattr(checked, field))
            faults += checked.faults
            sought.add(checked)
            digests.add(checked.digests)
        faults += [*sought.faults(), *digests.faults()]
        return Verified(splits, faults, sought.absences())


_Job = tuple[str, int, Shard]
# Paths of a cache's own exclude lists, and of other lists.
_Lists = tuple[Sequence[str], Sequence[str]]


def _checker(folder: str, plan: Plan, lists: _Lists) -> Callable[[_Job], Checked]:
    checker: Callable[..., Checked]
    if plan.adopted:
        checker = _of_adopted("checker")(folder, plan)
    else:
        checker = ShardChecker(folder, plan, *lists)
    return lambda job: checker(*job)


def _of_adopted(name: str) -> Any:
    """Returns an entry of the annex that adopts caches; raises a UserError without it."""
    found = annexes.get("adopted", name)
    if found is None:
        raise UserError("this installation cannot verify caches of other programs")
    return found


def _check_shared_files(folder: str, manifest: CacheManifest, names: set[str]) -> list[Fault]:
    """Checks the files outside shards, and that the folder has no unknown files."""
    from pipeline.building import lifecycle

    plan = manifest.plan
    faults = [Fault(MANIFEST, problem, FINISH) for problem in manifest.contradictions()]
    wanted = lifecycle.closing_files(manifest)
    for name, data in {**wanted, PLAN: files.json_bytes(as_json(plan))}.items():
        if name not in names:
            faults.append(Fault(name, "missing", FINISH))
        elif files.read_bytes(files.join(folder, name)) != data:
            what = "differs from the manifest's plan" if name == PLAN else "wrong content"
            remedy = "restore it, or build into another folder" if name == PLAN else FINISH
            faults.append(Fault(name, what, remedy))
    file = plan.vocabulary.file_name
    if file not in names:
        faults.append(Fault(file, "missing", FINISH))
    else:
        model = files.read_bytes(files.join(folder, file))
        if hashlib.sha256(model).hexdigest() != plan.vocabulary.sha256:
            faults.append(Fault(file, "not the vocabulary of the rows", FINISH))
        elif not vocabulary.Vocabulary(model, plan.vocabulary, file).counts_agree():
            faults.append(Fault(PLAN, "its vocabulary sizes are wrong", FINISH))
    lists = {copy_name(each.sha256) for each in plan.exclude or ()}
    locks = {name for name in names if name.startswith(LOCK)}
    known = {PLAN, PLAN_MARK + plan.fingerprint, *locks, file, *lists, *wanted}
    for split, shards in manifest.splits.items():
        for index, shard in enumerate(shards):
            known |= {*shard.files, shard_file(split, "receipt", index, len(shards))}
    for name in sorted(name for name in names - known if not name.startswith(old_states.BEFORE)):
        if name.startswith(files.PARTIAL):
            remedy = "run pipeline.build again, or delete it if no build is running"
            faults.append(Fault(name, "left behind by a killed build", remedy))
        else:
            faults.append(Fault(name, "not a file of this cache", "move or delete it"))
    return faults


def _own_lists(folder: str, plan: Plan) -> tuple[list[str], list[Fault]]:
    sound, faults = [], []
    for record in plan.exclude or ():
        name = copy_name(record.sha256)
        path = files.join(folder, name)
        there = files.exists(path)
        if there and files.sha256(path) == record.sha256:
            sound.append(path)
        else:
            what = "its bytes were changed" if there else "missing"
            faults.append(Fault(name, what, "give that list with pipeline.build --exclude again"))
    return sound, faults


class _Digests:
    """Document digests on disk, in parts that are sorted one at a time."""

    def __init__(self, scratch: str, documents: int):
        parts = 1 + 16 * documents // _DIGEST_BYTES
        self._paths = [os.path.join(scratch, str(part)) for part in range(parts)]

    def add(self, digests: bytes) -> None:
        values = np.frombuffer(digests, "u8").reshape(-1, 2)
        numbers = values[:, 0] % len(self._paths)
        values = values[np.argsort(numbers, kind="stable")]
        begin = 0
        for number, count in enumerate(np.bincount(numbers.astype(np.int64)).tolist()):
            if count:
                with open(self._paths[number], "ab") as part:
                    part.write(values[begin : begin + count].tobytes())
            begin += count

    def faults(self) -> Iterable[Fault]:
        """Returns a fault if ids made by Palimpsest repeat; ids from the corpus may repeat."""
        twice = 0
        for path in filter(os.path.exists, self._paths):
            values = np.fromfile(path, "u8").reshape(-1, 2)
            heads = np.sort(values[:, 0])
            again = heads[1:][heads[1:] == heads[:-1]]
            values = values[np.isin(values[:, 0], again)]
            values = values[np.lexsort(values.T)]
            twice += int((values[1:] == values[:-1]).all(1).sum())
        if not twice:
            return []
        remedy = "build the cache into another folder, and report this bug"
        return [Fault(MANIFEST, f"{twice:,} documents are in the cache more than once", remedy)]
