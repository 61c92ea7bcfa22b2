"""Life cycle of a cache's folder: locking, planning, surveying, extending and completing it.

Files are written in this order:

.plan-…     empty; named after the plan's fingerprint, to detect a damaged plan.json
plan.json   everything that determines the bytes of the cache
shards      in any order, each followed by a receipt with its checksums and the fingerprint
info, stats, manifest.json, COMPLETED   in this order, after all shards; the trainer relies on the
            manifest and stock seqio on COMPLETED, so both are deleted before redoing a shard

An extension, a plan with more files, replaces plan.json and renames shards to the new total. A
takedown, a plan with more exclude lists, first copies the lists, the manifest and the lineage of
affected shards (see tasks.cache.old_states), and deletes affected receipts before it replaces
plan.json; until then the other receipts name the old plan, so its command can complete the folder.

Afterwards the receipts that hold under both plans get the name of the new one. While they do, the
new mark names the old plan, so that a killed command is continued. A build of the old plan that
still runs, in a bucket or as a job that outlived its driver, finds its mark gone: it writes no
further receipt, and a receipt that it wrote in between does not count.
"""

import contextlib
import dataclasses
import functools
import json
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

from pipeline.exclusion import cache_lists
from pipeline.exclusion.lists import COPY, Given
from tasks.cache import old_states, plan_check
from tasks.cache.manifest import (
    MANIFEST,
    PLAN,
    PLAN_MARK,
    SHARD_KINDS,
    CacheManifest,
    Plan,
    Shard,
    as_json,
    plan_from_dict,
    shard_file,
)
from tasks.cache.receipts import finished, read_receipt, write_receipt
from tasks.document_kind import DocumentKind
from tasks.reading import sources
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabularies import tokenizer_json
from tasks.vocabulary import Vocabulary

COMPLETED = "COMPLETED"
# seqio derives the storage of integers from this version. Source: seqio `dataset_providers.py`,
# _CachedDataSource.
_SEQIO_VERSION = "0.0.20"
# Prefixes of plan differences that follow from different corpus files.
_FOLLOW_FROM_FILES = ("corpus.files", "corpus.generations", "corpus.left_out", "shards")
_PACKAGES = ("apache-beam", "numpy", "pyarrow", "sentencepiece")

ShardKey = tuple[str, int]


def planned(folder: str) -> Plan | None:
    """Returns the plan in plan.json, else the manifest's; None if neither file is sound."""
    try:
        plan = plan_from_dict(files.read_json(files.join(folder, PLAN)))
        if plan.fingerprint in _marks(folder):
            return plan
    except (FileNotFoundError, UserError):
        pass
    try:
        return CacheManifest.load(folder, check=False).plan
    except UserError:
        return None


def _marks(folder: str) -> set[str]:
    """Returns the plan fingerprints that name the folder's plan marks; two during an extension."""
    return {name.removeprefix(PLAN_MARK) for name in files.list_sizes(folder, PLAN_MARK)}


def check(folder: str, plan: Plan, extend: bool) -> Plan | None:
    """Returns the existing plan, None for a new cache; raises a UserError if ours does not fit."""
    existing = planned(folder)
    ours = plan_from_dict(json.loads(json.dumps(as_json(plan))))
    if existing is None:
        return _recovered(folder, ours)
    if ours.difference(existing):
        with contextlib.suppress(UserError):
            # If the manifest has our plan, the different plan.json is damaged.
            if not ours.difference(CacheManifest.load(folder, check=False).plan):
                return ours
        if plan_check.excludes_more(existing, ours):
            return existing
        _check_extends(folder, existing, ours, extend)
    return existing


def _recovered(folder: str, ours: Plan) -> Plan | None:
    """Returns our plan if it built a cache whose plan.json is damaged; None for a new cache."""
    names = files.list_names(folder)
    # A build copies its exclude lists first.
    others = [name for name in names if not name.startswith((".", COPY))]
    marks = _marks(folder)
    if not others:
        return None
    if PLAN not in names and not marks:
        raise UserError(
            f"{folder} holds {others[0]} but no {PLAN}, so it is not a Palimpsest cache: "
            "choose another --cache_dir"
        )
    if ours.fingerprint in marks:
        return ours
    if not any(".receipt-" in name for name in names):
        return None  # nothing is finished, so nothing can be lost or mixed
    if not marks:
        raise UserError(
            f"{folder} has no {PLAN_MARK} file, so it is from a version before 0.2.0 or a copy "
            "without hidden files: choose another --cache_dir"
        )
    raise UserError(
        f"{files.join(folder, PLAN)} is damaged, and these flags and this corpus make a "
        "different plan from the shards': use the flags that built them; if the cache was "
        "extended, restore the file from a copy or build again in another --cache_dir"
    )


def begin(
    folder: str,
    plan: Plan,
    vocabulary: Vocabulary,
    extend: bool,
    lists: Sequence[Given] = (),
    earlier: Sequence[dict[str, int]] = (),
) -> None:
    """Writes what is missing of vocabulary, exclude lists, plan mark and plan.json, in this order.

    A run that follows the build reads the others once plan.json exists. Shards with newly excluded
    documents lose their receipts and are rebuilt. With `extend`, a plan with more files may replace
    the existing one; `earlier` has the number of shards in each split before each extension.
    Raises a UserError, and changes nothing, if the folder holds something else.
    """
    generation = files.generation(files.join(folder, PLAN))
    existing = check(folder, plan, extend)
    cache_lists.copy(folder, plan, lists)
    before, kept = b"", dict[ShardKey, Shard]()
    if existing and existing.fingerprint != plan.fingerprint:
        before = existing.fingerprint.encode()
        for counts in earlier[: len(existing.generations) - 1]:  # as a killed extension left them
            renumber(folder, existing, counts)
        kept = settle(folder, existing, survey(folder, existing, check=False))
        redo = []
        if plan_check.excludes_more(existing, plan):
            redo = list(cache_lists.affected(folder, existing, plan, lists, kept))
            old_states.keep(folder, existing, redo)
        invalidate(folder, plan, redo)
        _remove_quarantines(folder, plan)
        for key in redo:
            del kept[key]
    # Both marks exist until the new plan is written.
    marks, mark = _marks(folder), files.join(folder, PLAN_MARK + plan.fingerprint)
    if plan.fingerprint not in marks or before:
        files.write_bytes(mark, before)
    copy = files.join(folder, plan.vocabulary.file_name)
    if not files.exists(copy) or files.sha256(copy) != plan.vocabulary.sha256:
        files.write_bytes(copy, vocabulary.model)
    text = files.json_bytes(as_json(plan))
    path = files.join(folder, PLAN)
    if not _holds(path, text) and not files.replace(path, text, generation):
        files.remove(mark)
        raise UserError(f"another build wrote {path} at the same time: run the same command again")
    for other in marks - {plan.fingerprint}:
        files.remove(files.join(folder, PLAN_MARK + other))
    cache_lists.remove_others(folder, plan, plan_check.guard(folder, plan.fingerprint).remove)
    for counts in earlier:
        renumber(folder, plan, counts)
    if existing:
        # The others were renamed with their shards.
        same = [split for split, count in existing.shards.items() if plan.shards[split] == count]
        _name_plan(folder, plan, {key: each for key, each in kept.items() if key[0] in same})


def _name_plan(folder: str, plan: Plan, shards: dict[ShardKey, Shard]) -> None:
    """Writes receipts that name the plan."""

    def write(key: ShardKey) -> None:
        name = shard_file(key[0], "receipt", key[1], plan.shards[key[0]])
        write_receipt(files.join(folder, name), shards[key], plan.fingerprint)

    _each(folder, write, shards)


def plan_before(folder: str, plan: Plan) -> str:
    """Returns the fingerprint of the plan whose receipts are being renamed; "" if all are."""
    try:
        return files.read_bytes(files.join(folder, PLAN_MARK + plan.fingerprint)).decode()
    except FileNotFoundError:
        return ""


def settle(
    folder: str, plan: Plan, found: dict[ShardKey, Shard | None], write: bool = True
) -> dict[ShardKey, Shard]:
    """Returns the finished shards: those `found` by `survey`, and some others.

    The receipts of these name the plan before, or none, but the shards are as the lists of this
    plan make them. Unless `write` is False, the receipts get the plan's name.
    """
    before = plan_before(folder, plan)
    sizes = files.list_sizes(folder)

    def look(key: ShardKey) -> Shard | None:
        of = folder, plan, *key
        shard = finished(*of, sizes, hashes=True, others=("", before))
        return shard if shard and cache_lists.holds(*of, shard) else None

    names = {key: shard_file(key[0], "receipt", key[1], plan.shards[key[0]]) for key in found}
    keys = [key for key, shard in found.items() if not shard and names[key] in sizes]
    shards = dict(zip(keys, _each(folder, look, keys), strict=True))
    settled = {key: shard for key, shard in shards.items() if shard}
    if write:
        _name_plan(folder, plan, settled)
        if before:
            files.write_bytes(files.join(folder, PLAN_MARK + plan.fingerprint), b"")
    return {key: shard for key, shard in {**found, **settled}.items() if shard}


def _remove_quarantines(folder: str, plan: Plan) -> None:
    """Deletes quarantine files of shards without a receipt, which may now leave nothing out."""
    for split, count in plan.shards.items():
        done = files.list_sizes(folder, f"{split}.receipt-")
        left_out = files.list_sizes(folder, f"{split}.quarantine-")
        for index in range(count):
            name = shard_file(split, "quarantine", index, count)
            if name in left_out and shard_file(split, "receipt", index, count) not in done:
                files.remove(files.join(folder, name))


def _check_extends(folder: str, existing: Plan, ours: Plan, extend: bool) -> None:
    """Raises a UserError unless our plan is the existing one plus one generation of files."""
    old, new = existing.corpus.get("files", []), ours.corpus.get("files", [])
    differences = _without_files(ours).difference(_without_files(existing))
    added = len(ours.generations) - len(existing.generations)
    follows = added == 1 and new[: len(old)] == old
    if not differences and follows and extend:
        return
    of_files = _differing_files(old, new)
    if not differences and follows:
        raise UserError(
            f"{folder} holds a cache of {len(old):,} files of this corpus, which now has "
            f"{len(new):,} ({of_files}): pass --extend to write the new files as further shards"
        )
    if follows and plan_check.excludes_more(_without_files(existing), _without_files(ours)):
        raise UserError(
            f"{folder}: the corpus has new files ({of_files}), and --exclude has new lists: add "
            "the files first, with --extend but without these lists, then give the lists"
        )
    spec, revision = existing.corpus.get("spec"), existing.corpus.get("revision")
    if not differences and of_files and spec == ours.corpus.get("spec"):
        raise UserError(
            f"{folder} holds a cache of this corpus as it was before ({of_files}): restore the "
            "files that have changed or are missing, or choose another --cache_dir"
        )
    if not differences and of_files and revision and revision != ours.corpus["revision"]:
        raise UserError(
            f"{folder} holds a cache of another revision of this corpus ({of_files}): choose "
            f"another --cache_dir, or build from the same revision with --corpus={spec}"
        )
    differences = ours.difference(existing)
    if of_files:
        others = [each for each in differences if not each.startswith(_FOLLOW_FROM_FILES)]
        differences = [*others, of_files]
    raise UserError(
        f"{folder} holds a cache with a different plan ({'; '.join(differences[:3])}): choose "
        "another --cache_dir, or use the flags that it was built with"
    )


def _differing_files(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """Returns the number and first names of changed, missing and added corpus files; or ""."""
    before, now = ({file["name"]: file for file in each} for each in (old, new))
    kinds = {
        "changed": [name for name in before if name in now and now[name] != before[name]],
        "missing": [name for name in before if name not in now],
        "added": [name for name in now if name not in before],
    }
    return "; ".join(
        f"{len(names):,} {kind}: {', '.join(names[:3])}{', …' if len(names) > 3 else ''}"
        for kind, names in kinds.items()
        if names
    )


def _without_files(plan: Plan) -> Plan:
    changing = {"files", "generations", "left_out"}
    kept = {key: plan.corpus[key] for key in plan.corpus.keys() - changing}
    if "files" in plan.corpus:
        spec = sources.parse(kept["spec"])
        location = spec.location if spec.kind == "hf" else "files"  # the pattern may change
        kept["spec"] = str(dataclasses.replace(spec, location=location, revision=""))
        kept["revision"] = ""
    return dataclasses.replace(plan, corpus=kept, shards={})


def renumber(folder: str, plan: Plan, earlier: dict[str, int]) -> None:
    """Renames the shards from before an extension; `earlier` has their number in each split.

    The old receipt is deleted last, so the call can be repeated after a kill at any point. Files
    without a valid receipt, of this plan or the one before, are deleted, and their shards redone.
    """
    names = set(files.list_names(folder))
    other = plan_before(folder, plan)

    def rename(key: ShardKey) -> None:
        split, index = key
        before, after = earlier[split], plan.shards[split]
        name_of = functools.partial(shard_file, split, index=index)
        new = {name_of(kind, count=before): name_of(kind, count=after) for kind in SHARD_KINDS}
        *data, receipt = new
        there = read_receipt(files.join(folder, receipt)) if receipt in names else None
        if there and (there.fits(plan) or there.plan == other != ""):
            for name in names.intersection(data):
                files.rename(files.join(folder, name), files.join(folder, new[name]))
            entries = {new[name]: entry for name, entry in there.shard.files.items()}
            renamed = dataclasses.replace(there.shard, files=entries)
            write_receipt(files.join(folder, new[receipt]), renamed, plan.fingerprint)
        for name in names.intersection(new):
            files.remove(files.join(folder, name))

    changed = {split: count for split, count in earlier.items() if count != plan.shards[split]}
    _each(folder, rename, _keys(changed))


def survey(
    folder: str, plan: Plan, check: bool = True, keys: Sequence[ShardKey] | None = None
) -> dict[ShardKey, Shard | None]:
    """Returns shards by (split, number), None if unfinished; `check` also compares checksums.

    `keys` are those of the shards to look at, by default all.
    """
    sizes = files.list_sizes(folder)
    keys = _keys(plan.shards) if keys is None else keys
    found = _each(folder, lambda key: finished(folder, plan, key[0], key[1], sizes, check), keys)
    return dict(zip(keys, found, strict=True))


def _each(folder: str, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    with ThreadPoolExecutor(files.threads(folder)) as pool:
        return list(pool.map(function, items))  # raises the threads' exceptions


def _keys(shards: dict[str, int]) -> list[ShardKey]:
    return [(split, index) for split, count in shards.items() for index in range(count)]


def is_marked(folder: str, plan: Plan, keys: Iterable[ShardKey]) -> bool:
    """Returns whether there is something for `invalidate` to delete."""
    marks = {shard_file(split, "receipt", index, plan.shards[split]) for split, index in keys}
    return not {COMPLETED, MANIFEST, *marks}.isdisjoint(files.list_names(folder))


def invalidate(
    folder: str,
    plan: Plan,
    keys: Iterable[ShardKey] = (),
    remove: Callable[[str], None] | None = None,
) -> None:
    """Deletes the files that mark a finished cache, and the receipts of shards `keys`."""
    remove = remove or files.remove
    remove(files.join(folder, COMPLETED))
    remove(files.join(folder, MANIFEST))
    receipts = {shard_file(split, "receipt", index, plan.shards[split]) for split, index in keys}
    for split in plan.shards if receipts else ():
        there = files.list_sizes(folder, f"{split}.receipt-").keys() & receipts
        _each(folder, lambda name: remove(files.join(folder, name)), there)


def complete(folder: str, plan: Plan, shards: dict[ShardKey, Shard]) -> bool:
    """Writes the closing files; returns False if all existed with the right content.

    Raises a UserError, and leaves none, if the folder got another plan.
    """
    splits = {
        split: tuple(shards[split, index] for index in range(count))
        for split, count in plan.shards.items()
    }
    packages = [*_PACKAGES]
    if plan.vocabulary.file_name == tokenizer_json.FILE:
        packages.append("tokenizers")
    versions = {package: metadata.version(package) for package in packages}
    manifest = CacheManifest(plan, splits, {"python": platform.python_version(), **versions})
    with contextlib.suppress(UserError):
        # A cache that differs only in versions of software is not rewritten.
        existing = CacheManifest.load(folder)
        kept = dataclasses.replace(manifest, software=existing.software)
        if as_json(existing) == as_json(kept):
            manifest = kept
    wanted = closing_files(manifest)
    stale = [name for name, data in wanted.items() if not _holds(files.join(folder, name), data)]
    if stale:
        guard = plan_check.guard(folder, plan.fingerprint)
        invalidate(folder, plan, remove=guard.remove)
        try:
            for name, data in wanted.items():
                files.write_bytes(files.join(folder, name), data, guard)
            guard.check()
        except UserError:
            guard.take_back()
            raise
    return bool(stale)


def closing_files(manifest: CacheManifest) -> dict[str, bytes]:
    """Returns a cache's last files in order (source of infos: seqio `beam_utils.py`, GetInfo)."""
    feature = {"dtype": "int32", "shape": [None]}
    other = "inputs" if manifest.plan.unit is DocumentKind.PAIR else "document_starts"
    features = {"features": {other: feature, "targets": feature}}
    found: dict[str, dict[str, Any]] = {}
    for split, shards in manifest.splits.items():
        sizes = {"num_shards": len(shards), "seqio_version": _SEQIO_VERSION}
        found[f"info.{split}.json"] = {**features, **sizes}
    found |= {f"stats.{split}.json": _seqio_stats(each) for split, each in manifest.splits.items()}
    written = {name: files.json_bytes(value) for name, value in found.items()}
    return {**written, MANIFEST: manifest.content(), COMPLETED: b"tfrecord"}


def _holds(path: str, data: bytes) -> bool:
    try:
        return files.read_bytes(path) == data
    except FileNotFoundError:
        return False


def _seqio_stats(shards: Sequence[Shard]) -> dict[str, int]:
    """Returns stats.SPLIT.json, without padding and EOS, as seqio does (`beam_utils.GetStats`)."""
    found = {
        "examples": sum(shard.rows for shard in shards),
        "targets_max_tokens": max((shard.longest_row for shard in shards), default=0),
        "targets_tokens": sum(shard.text_tokens for shard in shards),
    }
    if pairs := [shard.pairs for shard in shards if shard.pairs]:
        found["targets_max_tokens"] = max(pair.longest_targets for pair in pairs)
        found["inputs_max_tokens"] = max(pair.longest_inputs for pair in pairs)
        found["inputs_tokens"] = sum(pair.inputs_tokens for pair in pairs)
        found["targets_tokens"] -= found["inputs_tokens"]
    return found
