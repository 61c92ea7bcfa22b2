"""A build's exclude lists: the plan's records, their copies, and the effects of a new list."""

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipeline.exclusion import lists
from pipeline.exclusion.filter import Filter, base, opened
from pipeline.exclusion.traces import Traces, is_excluded
from tasks.cache.filtered import ExcludeRecord
from tasks.cache.manifest import Plan, Shard, shard_file
from tasks.storage import files
from tasks.terminal.command_line import UserError

_Shard = tuple[str, int]
_NAMED = 5  # maximum number of ids named in a message


def records(
    existing: Plan | None,
    new: Sequence[lists.Given],
    max_document_bytes: int,
    folder: str,
) -> tuple[ExcludeRecord, ...] | None:
    """Returns the records of a plan: the cache's, which stay in force, then the new ones.

    Raises a UserError if a list does not fit the cache, or if two may leave out both twins.
    """
    before = (existing.exclude or ()) if existing else ()
    added = [each for each in new if each.record not in before]
    for each in added:
        made_for = each.header.get("max_document_bytes", max_document_bytes)
        if each.record.paragraphs and made_for != max_document_bytes:
            raise UserError(
                f"an exclude list has paragraphs of documents split at {made_for:,} bytes: give "
                f"--max_document_bytes={made_for}, or make the list again with your value"
            )
        if existing and each.header["counts"].get("places"):
            raise UserError(
                f"{folder}: an exclude list distinguishes documents of equal ids by place, "
                "which a cache does not record: build into another --cache_dir"
            )
    found = (*before, *(each.record for each in added))
    for entries in ("documents", "paragraphs"):
        of_duplicates = [
            each for each in found if each.kind == lists.DUPLICATES and getattr(each, entries)
        ]
        if len(of_duplicates) > 1:
            other = " and build into another --cache_dir" if before else ""
            raise UserError(
                f"{folder}: two lists of duplicate {entries} may leave out both twins: use one list"
                f"{other}"
            )
    _check_units(before, added, folder)
    return found or None


def _check_units(
    before: Sequence[ExcludeRecord], added: Sequence[lists.Given], folder: str
) -> None:
    """Refuses lists of duplicate paragraphs whose kept twins may be in omitted documents."""
    of_paragraphs = [
        each for each in added if each.record.paragraphs and each.record.kind == lists.DUPLICATES
    ]
    earlier = any(each.kind == lists.DUPLICATES and each.paragraphs for each in before)
    if not of_paragraphs and not earlier:
        return
    # A list names others as they were given.
    originals = {each.record: each.original for each in added}
    of_documents = [
        originals.get(each) or _original(folder, each)
        for each in (*before, *originals)
        if each.kind == lists.DUPLICATES and each.documents
    ]
    known = [each.header.get("exclude", []) for each in of_paragraphs]
    new = set(originals.values())
    late = [sha256 for sha256 in of_documents if sha256 in new]
    if any(set(of_documents) - set(each) for each in known) or (earlier and late):
        raise UserError(
            f"{folder}: a list of duplicate paragraphs may keep one in a document that a list of "
            "duplicate documents leaves out: make it with --unit=paragraph "
            "--exclude=LIST_OF_DOCUMENTS"
        )


def _original(folder: str, record: ExcludeRecord) -> str:
    """Returns the SHA-256 of a cache's list as it was given."""
    path = files.join(folder, lists.copy_name(record.sha256))
    there = files.exists(path)
    return opened(path).header.get(lists.OF, record.sha256) if there else record.sha256


def copies(folder: str, plan: Plan, new: Sequence[lists.Given]) -> dict[str, str]:
    """Returns the paths of a plan's lists, by their names in a cache."""
    given_at = {each.record: each.path for each in new}
    names = {each: lists.copy_name(each.sha256) for each in plan.exclude or ()}
    return {name: given_at.get(each) or files.join(folder, name) for each, name in names.items()}


def copy(folder: str, plan: Plan, new: Sequence[lists.Given]) -> None:
    """Copies lists into the cache; raises a UserError if one is neither in it nor given."""
    for record in plan.exclude or ():
        name = lists.copy_name(record.sha256)
        path = files.join(folder, name)
        there = files.exists(path) and (
            files.is_remote(folder) or files.sha256(path) == record.sha256
        )
        again = [each.path for each in new if each.record == record]
        if not there and not again:
            raise UserError(f"{path} is missing or damaged: give that list with --exclude again")
        if not there:
            files.copy(again[0], path)


def remove_others(folder: str, plan: Plan, remove: Callable[[str], None]) -> None:
    """Deletes lists that the plan lacks, left by a takedown killed before it wrote its plan."""
    wanted = {lists.copy_name(each.sha256) for each in plan.exclude or ()}
    for name in files.list_sizes(folder, lists.COPY).keys() - wanted:
        remove(files.join(folder, name))


def notes(plan: Plan, new: Sequence[lists.Given]) -> Iterator[str]:
    """Yields lines about lists that say more of other corpora, and about those not given again."""
    for each in new:
        if lists.OF in each.header and not each.again:
            entries, total = sum(each.sizes), each.header[lists.OF_ENTRIES]
            yield f"--exclude={each.named}: {entries:,} of its {total:,} entries are of this corpus"
    for record in plan.exclude or ():
        if record not in [each.record for each in new if not each.again]:
            yield (
                f"still excluded: {record.documents:,} documents and {record.paragraphs:,} "
                f"paragraphs of {lists.copy_name(record.sha256)}"
            )


def affected(
    folder: str,
    existing: Plan,
    ours: Plan,
    new: Sequence[lists.Given],
    shards: Mapping[_Shard, Shard],
) -> Iterator[_Shard]:
    """Yields those finished shards with a document, kept or quarantined, on a new list."""
    before = existing.exclude or ()
    added = (ours.exclude or ())[len(before) :]
    paths = copies(folder, ours, new)
    filter_ = Filter.of_files(paths[lists.copy_name(each.sha256)] for each in added)
    for (split, index), shard in shards.items():
        if _touches(filter_, folder, split, index, existing.shards[split], shard):
            yield split, index


def holds(folder: str, plan: Plan, split: str, index: int, shard: Shard) -> bool:
    """Returns whether a shard is as the plan's lists make it, whoever wrote it."""
    from pyarrow import parquet

    lists_ = Filter.of_cache(folder, [each.sha256 for each in plan.exclude or ()])
    if not lists_:
        return True
    name = functools.partial(shard_file, split, index=index, count=plan.shards[split])
    with files.open_read(files.join(folder, name(kind="documents"))) as file:
        lineage = parquet.read_table(file, columns=["id", "document_offset"])
    firsts = np.flatnonzero(lineage.column("document_offset").to_numpy() == 0).tolist()
    left_out = [*_lines(files.join(folder, name(kind="quarantine")))] if shard.dropped else []
    traces = Traces(lineage.column("id").to_pylist(), firsts, left_out, plan.file_names)
    return traces.hold(lists_, shard.cut_paragraphs or 0)


def _touches(of: Filter, folder: str, split: str, index: int, count: int, shard: Shard) -> bool:
    from pyarrow import parquet

    path = files.join(folder, shard_file(split, "documents", index, count))
    with files.open_read(path) as file, parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(columns=["id"]):
            if of.touches(batch.column("id").to_pylist()):
                return True
    if not shard.dropped:
        return False
    left_out = files.join(folder, shard_file(split, "quarantine", index, count))
    return of.touches([line["id"] for line in _lines(left_out)])


def left_out(
    folder: str, plan: Plan, shards: Mapping[_Shard, Shard], new: Sequence[lists.Given]
) -> Iterator[str]:
    """Yields what a build left out by each given list, and what is not in the corpus."""
    of_ids = [each for each in new if each.lines and not each.again]
    documents = Counter[str]()
    for (split, index), shard in shards.items() if of_ids else ():
        if any(reason.startswith(lists.EXCLUDED) for reason in shard.dropped):
            name = shard_file(split, "quarantine", index, plan.shards[split])
            for line in _lines(files.join(folder, name)):
                if is_excluded(line["reason"]):
                    documents.update({line["id"], base(line["id"])})
    for each in of_ids:
        ids = each.lines or {}
        missing = [line for line, id in ids.items() if not documents[id]]
        found = sum(documents[id] for id in ids.values())
        if found > len(ids) - len(missing):
            yield (
                f"--exclude={each.named}: left out {found:,} documents or parts of them, which "
                f"have {len(ids) - len(missing):,} ids"
            )
        if missing:
            more = ", …" if len(missing) > _NAMED else ""
            yield (
                f"--exclude={each.named}: {len(missing):,} of {len(ids):,} ids are not in the "
                f"corpus: {', '.join(map(repr, missing[:_NAMED]))}{more}"
            )
    yield from _missed(plan, shards, new)


def _missed(
    plan: Plan, shards: Mapping[_Shard, Shard], new: Sequence[lists.Given]
) -> Iterator[str]:
    """Yields a line if lists of duplicates name documents that the corpus does not have."""
    of_dedup = [each for each in new if each.lines is None and not each.again]
    if not of_dedup or any(each.record not in (plan.exclude or ()) for each in of_dedup):
        return
    dropped, cut = Counter[str](), 0
    for shard in shards.values():
        dropped.update(shard.dropped)
        cut += shard.cut_paragraphs or 0
    listed = sum(each.record.documents for each in of_dedup)
    found = sum(dropped[reason] for reason in (lists.EXACT, lists.NEAR, lists.CONTAMINATED))
    paragraphs = sum(each.record.paragraphs for each in of_dedup)
    for unit, wanted, there in (("documents", listed, found), ("paragraphs", paragraphs, cut)):
        if there < wanted:
            names = ",".join(each.named for each in of_dedup)
            yield (
                f"--exclude={names}: {wanted - there:,} of {wanted:,} listed {unit} are not in the "
                "corpus: was the list made from it, with the same columns?"
            )


def _lines(path: str) -> Iterator[dict]:
    lines = (json.loads(line) for line in files.read_lines(path))
    return ({**line, "id": line["id"] or ""} for line in lines)
