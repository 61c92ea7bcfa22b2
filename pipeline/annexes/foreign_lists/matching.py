"""Finds the files that an exclude list was made from in other corpora.

A document's default id, "file:row", begins below the fixed folder of a pattern, so one document has
several ids: "ro/a.parquet:7" under data/*/*.parquet, "a.parquet:7" under data/ro/*.parquet. A list
of duplicates therefore names its files, and a file is the same if it lies at the same path,
or has the same content and the most similar path.
"""

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.exclusion.origins import File, Origin


def digest(record: Mapping[str, Any]) -> str:
    """Returns the hash of a corpus's files in lists of version 0.2.0."""
    data = json.dumps(record.get("files", []), sort_keys=True).encode()
    return hashlib.sha256(data).hexdigest()


@dataclasses.dataclass(frozen=True)
class Match:
    """A file of a list in a corpus."""

    key: str  # the corpus
    file: File  # as it is there
    same: bool  # whether the content is equal


def matches(ours: Sequence[File], corpora: Mapping[str, Origin]) -> dict[int, Match]:
    """Returns, by its index in `ours`, where a file of a list is in the corpora; each at most once.

    First come files at the same path, even if they have changed, then files of the same content at
    the most similar path. If several are equally similar, none is the one. Members of archives are
    where their archives are.
    """
    whole = [number for number, file in enumerate(ours) if not file.member]
    of_whole = _matches([ours[number] for number in whole], corpora)
    found = {whole[place]: match for place, match in of_whole.items()}
    archives = {ours[number].path: match for number, match in found.items()}
    for number, file in enumerate(ours):
        match = archives.get(file.folder + file.archive) if file.member else None
        if match:
            there = match.file.within(match.file.name + file.member)
            found[number] = dataclasses.replace(match, file=there)
    return found


def _matches(ours: Sequence[File], corpora: Mapping[str, Origin]) -> dict[int, Match]:
    theirs = [(key, file) for key, origin in corpora.items() for file in origin.files]
    at = {file.path: place for place, (_, file) in enumerate(theirs) if file.folder}
    found: dict[int, Match] = {}
    taken = set()
    for number, file in enumerate(ours):
        place = at.get(file.path)
        if place is not None and file.folder:
            taken.add(place)
            found[number] = Match(*theirs[place], same=_may_equal(file, theirs[place][1]))
    alike: dict[Any, list[int]] = defaultdict(list)
    for place, (_, file) in enumerate(theirs):
        if place not in taken:
            for trait in _traits(file):
                alike[trait].append(place)
    pairs = [
        (_common(file, theirs[place][1]), number, place)
        for number, file in enumerate(ours)
        if number not in found
        for place in dict.fromkeys(place for trait in _traits(file) for place in alike[trait])
        if _equals(file, theirs[place][1])
    ]
    found |= {number: Match(*theirs[place], same=True) for number, place in _clear(pairs)}
    return found


def _clear(pairs: list[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yields those (number, place) whose likeness no other pair of either has."""
    best: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for likeness, number, place in sorted(pairs, reverse=True):
        for side in (("ours", number), ("theirs", place)):
            alike = best.setdefault(side, [])
            if not alike or alike[0][0] == likeness:
                alike.append((likeness, number if side[0] == "theirs" else place))
    for _, number, place in pairs:
        sides = best["ours", number], best["theirs", place]
        if [[each for _, each in side] for side in sides] == [[place], [number]]:
            yield number, place


def _traits(file: File) -> tuple[Any, Any]:
    """Returns two values; files that may be equal have one of them in common."""
    return (file.bytes, file.state), (file.bytes, file.name.rpartition("/")[2])


def _common(one: File, other: File) -> int:
    """Returns the number of last components that two paths share."""
    pairs = zip(reversed(one.path.split("/")), reversed(other.path.split("/")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), _depth(one, other))


def _depth(*of: File) -> int:
    return min(file.path.count("/") + 1 for file in of)


def _may_equal(one: File, other: File) -> bool:
    """Returns False if the sizes or checksums of two files differ."""
    comparable = dict(one.state).keys() == dict(other.state).keys()
    return one.bytes == other.bytes and (one.state == other.state or not comparable)


def _equals(one: File, other: File) -> bool:
    """Returns whether contents are equal, judging by names if checksums are of two kinds."""
    if one.state and one.state == other.state:
        return True
    least = min(file.name.count("/") + 1 for file in (one, other))
    return _may_equal(one, other) and _common(one, other) >= least
