"""Adopts a cache: scans its files in parallel, then writes indices, receipts and, last, a manifest.

An interrupted adoption keeps files with receipts; a repeated one compares checksums and rescans
changed files.
"""

import dataclasses
import errno
import functools
import hashlib
import io
import itertools
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata

import numpy as np

from pipeline.annexes.adopting import megatron, seqio_cache
from pipeline.annexes.adopting.options import CONCAT, TARGETS, Options
from pipeline.annexes.adopting.scan import MOST_IDS, Found, Scan
from tasks import registry
from tasks.cache.adopted import Adoption
from tasks.cache.manifest import (
    MANIFEST,
    PAIRS,
    PLAN,
    ROWS,
    CacheManifest,
    FileEntry,
    PairLimits,
    Plan,
    Shard,
    as_json,
    shard_file,
    shard_from_dict,
)
from tasks.storage import files, lock
from tasks.terminal import processes
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, Vocabulary, VocabularyRecord, load

# Field of a receipt: the EOS id, if not EOS_ID.
_EOS = "eos"


def adopt(options: Options) -> tuple[Found, CacheManifest]:
    """Writes a cache's index and manifest; returns what was found and written."""
    folder, target = options.cache_dir, options.index_dir or options.cache_dir
    vocabulary = None
    if options.task_module:
        registry.load(options.task_module)
    if options.vocabulary:
        vocabulary = load(options.vocabulary, options.extra_ids)
    elif options.extra_ids:
        raise UserError("--extra_ids has no effect without --vocabulary")
    _check_target(target, vocabulary)
    found = survey(options)
    if vocabulary and found.is_pairs and vocabulary.special.eos != EOS_ID:
        raise UserError(
            f"the EOS of {options.vocabulary} is id {vocabulary.special.eos}: pairs of other "
            f"programs can have only EOS {EOS_ID}; build them with pipeline.build"
        )
    try:
        files.make_folder(target)
        with lock.held(target, "adoption", "--index_dir" if options.index_dir else "--cache_dir"):
            files.remove_partial(target)
            shards = _adopted(options, target, found, vocabulary)
            check_examples(folder, found, shards)
            manifest = _manifest(options, found, vocabulary, shards)
            if vocabulary:
                copy = files.join(target, vocabulary.record.file_name)
                files.write_bytes(copy, vocabulary.model)
            files.write_bytes(files.join(target, MANIFEST), manifest.content())
    except OSError as error:
        if options.index_dir or error.errno not in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise
        raise UserError(
            f"{folder} cannot be written to: give a folder for index and manifest with --index_dir"
        ) from error
    return found, manifest


def survey(options: Options) -> Found:
    """Returns the files of a cache; raises a UserError if they or the options do not fit."""
    folder = options.cache_dir
    names = files.list_names(folder)
    if seqio_cache.is_one(names):
        if options.validation:
            raise UserError("--validation has no effect on a seqio cache, which has splits")
        found = seqio_cache.survey(folder, names, options.read)
    elif megatron.is_one(names):
        if options.read == PAIRS:
            raise UserError(f"--read={PAIRS}: Megatron data sets have no inputs")
        found = megatron.survey(folder, names, options.validation)
    elif names:
        raise UserError(
            f"{folder} holds neither info.SPLIT.json of a seqio cache nor .idx files of "
            f"Megatron, but {', '.join(names[:3])}: name the folder of one task"
        )
    else:
        raise UserError(f"{folder} is empty or does not exist")
    if found.is_pairs and options.packing:
        raise UserError(
            f"--packing={options.packing} has no effect on pairs: leave it out, or give "
            f"--read={TARGETS}"
        )
    return found


def _check_target(target: str, vocabulary: Vocabulary | None) -> None:
    path = files.join(target, MANIFEST)
    model = files.join(target, vocabulary.record.file_name) if vocabulary else ""
    if files.exists(path):
        try:
            adopted = CacheManifest.load(target, check=False).plan.adopted
        except UserError as error:
            raise UserError(
                f"{path} is damaged or another program's: delete it, or give an --index_dir"
            ) from error
        if adopted is None:
            raise UserError(f"{target} is a cache of pipeline.build and needs no adoption")
    elif files.exists(files.join(target, PLAN)):
        raise UserError(f"{target} is an unfinished build of pipeline.build: run that again")
    elif vocabulary and files.exists(model) and files.sha256(model) != vocabulary.record.sha256:
        raise UserError(f"{model} is a different vocabulary: give that one, or an --index_dir")


@dataclasses.dataclass(frozen=True)
class _Job:
    """A file of records to scan, and the names of the output files."""

    # source, target: folders of the file and of the output.
    source: str
    target: str
    name: str
    size: int
    index: str
    receipt: str
    kept: int | None  # size of a row index that has a receipt; None if the file must be scanned
    hashes: bool  # whether to compare checksums with the receipt
    is_pairs: bool
    ids: int  # number of ids; `is_pairs` and `scan` are as in `Found`
    eos: int
    scan: Callable[[str, int, int], Scan]


def _adopted(
    options: Options, target: str, found: Found, vocabulary: Vocabulary | None
) -> dict[str, tuple[Shard, ...]]:
    """Returns the shards by split; scans files without a receipt or with changed content."""
    source, ids = options.cache_dir, vocabulary.size if vocabulary else MOST_IDS
    eos = vocabulary.special.eos if vocabulary else EOS_ID
    sizes = files.list_sizes(source)
    own = sizes if target == source else files.list_sizes(target)
    # Read all bytes of remote files only if a finished adoption has since changed.
    hashes = files.exists(files.join(target, MANIFEST)) or not files.is_remote(source)
    jobs: list[_Job] = []
    for split, names in found.files.items():
        for number, name in enumerate(names):
            if name not in sizes:
                raise UserError(
                    f"{files.join(source, name)} is not a file, but a folder or a dangling link: "
                    "restore it from a copy"
                )
            of = functools.partial(shard_file, split, index=number, count=len(names))
            index, receipt = of("rows"), of("receipt")
            # A Megatron receipt does not tell whether the .idx file has changed.
            kept = own.get(index) if receipt in own and not found.token else None
            files_of = (source, target, name, sizes[name], index, receipt, kept)
            jobs.append(_Job(*files_of, hashes, found.is_pairs, ids, eos, found.scan))
    bytes_of = [job.size for job in jobs]
    workers = options.workers if sum(bytes_of) > processes.SMALL_BYTES else 1
    scan = "adopting", functools.partial, (_shard,)
    each = iter(list(processes.in_order(*scan, jobs, bytes_of, workers)))
    return {
        split: tuple(itertools.islice(each, len(names))) for split, names in found.files.items()
    }


def _shard(job: _Job) -> Shard:
    if kept := _finished(job):
        return kept
    scan = job.scan(job.name, job.ids, job.eos)
    shard = shard_of(job.name, job.index, scan)
    for name in (MANIFEST, job.receipt):  # they describe different content
        files.remove(files.join(job.target, name))
    files.write_bytes(files.join(job.target, job.index), index_bytes(scan.index))
    receipt = {**as_json(shard), **({} if job.eos == EOS_ID else {_EOS: job.eos})}
    files.write_json(files.join(job.target, job.receipt), receipt)
    return shard


def _finished(job: _Job) -> Shard | None:
    """Returns a receipt's shard; None if the receipt is missing or stale."""
    if job.kept is None:
        return None
    try:
        receipt = files.read_json(files.join(job.target, job.receipt))
        eos = receipt.pop(_EOS, EOS_ID) if isinstance(receipt, dict) else EOS_ID
        shard = shard_from_dict(receipt)
    except UserError:
        return None
    if eos != job.eos:  # row ends were counted with a different id
        return None
    index, entry = (shard.files.get(name) for name in (job.index, job.name))
    if not index or not entry or not shard.adopted or (shard.pairs is None) == job.is_pairs:
        return None
    if (job.kept, job.size) != (index.bytes, entry.bytes) or shard.adopted.ids > job.ids:
        return None
    places = ((job.target, job.index, index), (job.source, job.name, entry))
    for folder, name, wanted in places if job.hashes else ():
        if files.sha256(files.join(folder, name)) != wanted.sha256:
            return None
    return shard


def index_bytes(index: np.ndarray) -> bytes:
    """Returns the file content of a row index."""
    file = io.BytesIO()
    np.save(file, index, allow_pickle=False)
    return file.getvalue()


def shard_of(records: str, index: str, scan: Scan) -> Shard:
    """Returns the shard of a scanned file; `records` and `index` are file names."""
    data = index_bytes(scan.index)
    tokens = int(scan.index["tokens"].sum())
    return Shard(
        files={records: scan.entry, index: FileEntry(len(data), hashlib.sha256(data).hexdigest())},
        rows=len(scan.index),
        tokens=tokens,
        documents=scan.documents,
        text_bytes=0,
        dropped={},
        text_tokens=tokens,
        longest_row=int(scan.index["tokens"].max(initial=0)),
        pairs=scan.pairs,
        split_documents=0,
        adopted=scan.counts,
    )


def check_examples(folder: str, found: Found, shards: Mapping[str, Sequence[Shard]]) -> None:
    """Raises a UserError if there are no rows, or not as many as the program states."""
    for split, wanted in found.examples.items():
        rows = sum(shard.rows for shard in shards.get(split, ()))
        if rows != wanted:
            raise UserError(
                f"{folder} has {rows:,} rows of {split}, but stats.{split}.json says {wanted:,}: "
                "files were cut short or exchanged; restore them from a copy"
            )
    if not any(shard.tokens for each in shards.values() for shard in each):
        raise UserError(f"{folder} has no tokens")


def _manifest(
    options: Options,
    found: Found,
    vocabulary: Vocabulary | None,
    shards: dict[str, tuple[Shard, ...]],
) -> CacheManifest:
    folder = options.cache_dir
    if not files.is_remote(folder):
        folder = os.path.abspath(files.local_path(folder))
    every = [shard for each in shards.values() for shard in each]
    counts = [shard.adopted for shard in every if shard.adopted]
    ends, empty = (sum(getattr(count, of) for count in counts) for of in ("targets_ends", "empty"))
    full = sum(shard.rows for shard in every) - empty
    entries = [sorted(as_json(shard)["files"].items()) for shard in every]
    pieces = max(count.ids for count in counts)
    unknown = VocabularyRecord(sha256="", pieces=pieces, extra_ids=0, sentinels=0)
    version = {found.program: found.version} if found.version else {}
    plan = Plan(
        task=folder.rstrip("/").rpartition("/")[2],
        corpus={"spec": f"adopted from {found.program}", "unknown": list(found.unknown)},
        vocabulary=vocabulary.record if vocabulary else unknown,
        packing=PAIRS if found.is_pairs else options.packing or CONCAT,
        row_tokens=0 if found.is_pairs else max(shard.longest_row for shard in every),
        separator="eos" if not found.is_pairs and ends == full else "none",
        shards={split: len(each) for split, each in shards.items()},
        pairs=PairLimits(0, 0, "cut") if found.is_pairs else None,
        adopted=Adoption(
            program=found.program,
            folder=folder if options.index_dir else "",
            token=found.token,
            sha256=hashlib.sha256(json.dumps(entries).encode()).hexdigest(),
        ),
    )
    versions = {"python": platform.python_version(), "numpy": metadata.version("numpy")}
    return CacheManifest(plan, shards, {**versions, **version})


def summary(found: Found, manifest: CacheManifest) -> list[str]:
    """Returns lines that say what was adopted, what is unknown and what was not read."""
    plan = manifest.plan
    counts = [shard.adopted for each in manifest.splits.values() for shard in each if shard.adopted]
    rows = sum(manifest.total(split, "rows") for split in manifest.splits)
    kinds = {
        PAIRS: "each row is a pair of inputs and targets",
        ROWS: "each row is a window",
        CONCAT: "rows are joined into one stream of tokens",
    }
    lines = [f"read: {kinds[plan.packing]}"]
    if found.unread:
        lines.append(f"not read: the features {', '.join(found.unread)}")
    eos = "EOS" if plan.vocabulary.sha256 or found.is_pairs else f"id {EOS_ID}"
    for side in plan.unit.columns if found.is_pairs else ("targets",):
        ends = sum(getattr(count, f"{side}_ends") for count in counts)
        what = ", which is left out, as the objective adds one" if found.is_pairs and ends else ""
        lines.append(f"{side}: {ends:,} of {rows:,} rows end in {eos}{what}")
    zeros, empty = (sum(getattr(count, name) for count in counts) for name in ("zeros", "empty"))
    if zeros and plan.vocabulary.special_ids.zero_pads:
        lines.append(f"warning: {zeros:,} ids are 0, which is padding here and has no loss")
    if empty:
        lines.append(f"warning: {empty:,} rows have no targets")
    if not plan.vocabulary.sha256:
        lines.append(
            f"vocabulary: not known, ids 0 to {plan.vocabulary.size - 1:,} occur; there are no "
            "sentinels, and text is not shown"
        )
    lines.append(f"not known: {', '.join(found.unknown)}")
    return lines
