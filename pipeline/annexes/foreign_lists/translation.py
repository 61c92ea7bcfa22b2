"""Lists as a corpus sees them: with its own ids, and only what they say of its documents.

A list of duplicates knows its files (`pipeline.exclusion.origins`). In another corpus that
has them, its entries get the ids that their documents have there. A line "path:row" of a text file
of ids names the document whose file's path ends so, whatever pattern finds it. Lists that fit as
they are remain byte for byte the same.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa

from pipeline.annexes.foreign_lists import matching
from pipeline.annexes.foreign_lists.matching import Match
from pipeline.exclusion import lists
from pipeline.exclusion.lists import ExcludeList, Given
from pipeline.exclusion.origins import File, Origin
from pipeline.exclusion.targets import Target
from tasks.reading.corpus import IN_ARCHIVE, file_of
from tasks.storage import files
from tasks.terminal.command_line import UserError

_PLACE = re.compile(r"(.+):(\d+(?:#part\d+)?)")


def translated(
    given: Sequence[Given], targets: Mapping[str, Target], scratch: str
) -> dict[str, list[Given]]:
    """Returns the lists for each corpus, without those that name no document of it.

    Raises a UserError for a list that names no document of any corpus, and for a line that may name
    documents of several files.
    """
    found: dict[str, list[Given]] = {key: [] for key in targets}
    for each in given:
        opened = ExcludeList(each.path)
        if each.lines is not None:
            of_each = _of_lines(each, targets, scratch)
        elif len(opened) and opened.origins:
            of_each = _of_files(each, opened, targets, scratch)
        else:
            of_each = _as_it_is(each, targets)
        for key, one in of_each.items():
            found[key].append(one)
    return found


def _as_it_is(each: Given, targets: Mapping[str, Target]) -> dict[str, Given]:
    """Returns a list that names no files; refuses one that was made from other files."""
    wanted = each.header.get("files", "")
    for target in targets.values():
        known = wanted in ("", matching.digest(target.record)) or each.record in target.in_force
        if not (known or each.again) and sum(each.header["counts"].values()):
            raise UserError(
                f"--exclude={each.named}: a search of version 0.2.0 made this list from "
                f"other files than {target.origin.corpus}, those of {each.header.get('corpus')}: "
                "make it again"
            )
    return dict.fromkeys(targets, each)


def _of_lines(each: Given, targets: Mapping[str, Target], scratch: str) -> dict[str, Given]:
    """Returns the list of each corpus: lines that name its documents, and those of no known file.

    These may be ids that a column holds, or of files that come later.
    """
    if all(each.record in target.in_force for target in targets.values()):
        return dict.fromkeys(targets, each)
    lines = each.lines or {}
    placed = _placed(lines, targets, each.named)
    found = {}
    for key in targets:
        here = {line: id for line, (of, id) in placed.items() if of == key}
        here |= {line: line for line in lines if line not in placed}
        if here:
            found[key] = each if here == lines else _of_ids(each, here, scratch)
    return found


def _of_ids(each: Given, lines: Mapping[str, str], scratch: str) -> Given:
    path = lists.scratch_file(scratch)
    of = {lists.OF: each.original, lists.OF_ENTRIES: len(each.lines or ())}
    files.write_bytes(path, lists.of_ids(lines.values(), **of))
    return _given(each, path, lines)


def others(each: Given, targets: Mapping[str, Target], scratch: str) -> Given | None:
    """Returns what a list says of corpora besides `targets`; None if nothing."""
    if each.lines is None:
        return each if ExcludeList(each.path).origins or each.record.kind == lists.IDS else None
    placed = _placed(each.lines, targets, each.named)
    rest = {line: line for line in each.lines if line not in placed}
    return _of_ids(each, rest, scratch) if placed and rest else each if rest else None


def _placed(
    lines: Collection[str], targets: Mapping[str, Target], named: str
) -> dict[str, tuple[str, str]]:
    """Returns line -> (corpus, id there) for lines "path:row" that end like the path of a file."""
    by_name: dict[str, list[tuple[str, File]]] = {}
    by_end: dict[str, list[tuple[str, File]]] = {}
    for key, target in targets.items():
        for file in target.origin.files:
            by_name.setdefault(file.name, []).append((key, file))
            by_end.setdefault(file.name.rpartition("/")[2], []).append((key, file))
    found = {}
    for line in lines:
        if not (match := _PLACE.fullmatch(line)):
            continue
        path, place = match.groups()
        whole = file_of(path, by_name) or path.partition(IN_ARCHIVE)[0]
        member = path.removeprefix(whole)
        alike = by_end.get(whole.rpartition("/")[2], ())
        of = by_name.get(whole) or [
            (key, file) for key, file in alike if f"/{file.path}".endswith(f"/{whole}")
        ]
        if len(of) > 1:
            some = " or ".join(file.path for _, file in of[:3])
            raise UserError(
                f"--exclude={named}: {line} may name a document of {some}: write more of its path"
                + (" or name one language with --languages" if len(targets) > 1 else "")
            )
        for key, file in of:
            found[line] = key, f"{file.name}{member}:{place}"
    return found


def ids_of(line: str, names: Collection[str]) -> list[str]:
    """Returns the ids that a line has where the corpus's files have these names."""
    found = [line]
    if match := _PLACE.fullmatch(line):
        path, place = match.groups()
        above = path.partition(IN_ARCHIVE)[0].split("/")
        ends = (path.removeprefix("/".join(above[:count]) + "/") for count in range(1, len(above)))
        found += [f"{end}:{place}" for end in ends if file_of(end, names)]
    return found


def _given(each: Given, path: str, of_each: Mapping[str, str] | None = None) -> Given:
    opened = ExcludeList(path, each.named)
    record = lists.record_of(path, opened)
    return dataclasses.replace(each, record=record, path=path, header=opened.header, lines=of_each)


def _of_files(
    each: Given, opened: ExcludeList, targets: Mapping[str, Target], scratch: str
) -> dict[str, Given]:
    """Returns the list of each corpus that has files of a list with origins."""
    places = matching.matches(opened.files, {key: one.origin for key, one in targets.items()})
    found = {}
    for key in targets:
        kept = _kept(opened, {number: one for number, one in places.items() if one.key == key})
        if not kept:
            continue
        if len(kept) == len(opened.files) and all(
            one.same and one.file.name == opened.files[number].name for number, one in kept.items()
        ):
            found[key] = each
            continue
        path = lists.scratch_file(scratch)
        if _rewrite(opened, kept, each.original, path):
            found[key] = _given(each, path)
    if not found and not each.again:
        from_ = " and ".join(origin.corpus for origin in opened.origins)
        corpora = " and ".join(target.origin.corpus for target in targets.values())
        raise UserError(
            f"--exclude={each.named} was made from {from_}, and names no document of {corpora}, "
            "which has other files or changed ones: make the list from this corpus"
        )
    return found


def _kept(opened: ExcludeList, places: dict[int, Match]) -> dict[int, Match]:
    """Returns the files of a list whose entries a corpus needs.

    If they have the same names as in one of the list's corpora, its other files remain as well: an
    extension may add them.
    """
    begin, touched = 0, []
    for origin in opened.origins:
        span = range(begin, begin + len(origin.files))
        begin = span.stop
        if places.keys() & set(span):
            touched.append(span)
    unchanged = all(
        one.same and one.file.name == opened.files[number].name for number, one in places.items()
    )
    if len(touched) != 1 or not unchanged:
        return places
    (span,) = touched
    return {number: places.get(number, Match("", opened.files[number], True)) for number in span}


def _rewrite(opened: ExcludeList, kept: Mapping[int, Match], original: str, path: str) -> int:
    """Writes the entries of files as `kept` names them; returns their number.

    Of a file that has changed only documents with an id of their own can be told.
    """
    ours = opened.files
    numbers = sorted(kept, key=lambda number: kept[number].file.name)
    place_of = np.full(len(ours), -1, np.int64)
    place_of[numbers] = np.arange(len(numbers))
    table = pa.Table.from_batches(opened.batches)
    table = table.filter(pa.array(place_of[table.column("file").to_numpy()] >= 0))
    columns = {name: table.column(name).to_numpy() for name in table.column_names if name != "twin"}
    old = columns["file"].tolist()
    rows = [
        f"{row}#part{part}" if part > 1 else str(row)
        for row, part in zip(columns["row"].tolist(), columns["part"].tolist(), strict=True)
    ]
    before = lists.id_digests(
        f"{ours[file].name}:{row}" for file, row in zip(old, rows, strict=True)
    )
    after = lists.id_digests(
        f"{kept[file].file.name}:{row}" for file, row in zip(old, rows, strict=True)
    )
    keys = np.stack([columns["high"], columns["low"]], 1)
    by_place = (keys == before).all(1)
    keys[by_place] = after[by_place]
    columns["high"], columns["low"] = keys.T
    columns["place"] = np.array(
        [
            place and lists.place_hash(f"{kept[file].file.name}:{row}")
            for place, file, row in zip(
                columns["place"].tolist(), old, columns["row"].tolist(), strict=True
            )
        ],
        np.uint64,
    )
    columns["file"] = place_of[columns["file"]]
    told = np.array([kept[file].same for file in old], bool)
    told |= ~by_place & (columns["place"] == 0)
    order = np.lexsort([columns[name] for name in ("paragraph", "place", "low", "high")])
    order = order[told[order]]
    twins = table.column("twin").combine_chunks()
    wanted = {name: values[order] for name, values in columns.items()}
    wanted["twin"] = twins.take(pa.array(order))
    whole = int((wanted["paragraph"] == lists.WHOLE).sum())
    counts = {
        "documents": whole,
        "paragraphs": len(order) - whole,
        "places": int((wanted["place"] > 0).sum()),
    }
    of = {lists.OF: original, lists.OF_ENTRIES: len(opened)}
    header = {**opened.header, "counts": counts, **of}
    named = Origin(
        "", tuple(dataclasses.replace(kept[number].file, folder="") for number in numbers)
    )
    with files.atomic_write(path) as file:
        lists.write(file, header, lists.in_batches(wanted), [named])
    return len(order)
