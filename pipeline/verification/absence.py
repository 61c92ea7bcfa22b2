"""Proves that a cache holds no document of exclude lists; counts those that were left out."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pipeline.exclusion import origins, targets
from pipeline.exclusion.filter import opened
from pipeline.exclusion.lists import OF, OF_ENTRIES, Given, id_digests
from pipeline.verification.shard import EXCLUDE, HAS_LIST, Checked, Fault, Present, listed
from tasks import annexes
from tasks.cache.manifest import Plan

_NAMED = 5  # maximum number of ids named in a line


@dataclasses.dataclass(frozen=True)
class Absence:
    """Counts of the documents of a given list, if the cache holds none of them."""

    named: str
    documents: int  # of this corpus, whatever its place
    paragraphs: int
    removed: int  # documents that the build left out
    unchecked: int  # documents that others of equal ids may hide
    missing: list[str]  # ids of a text file that no document of the corpus has
    elsewhere: int  # entries for documents of other corpora

    def __str__(self) -> str:
        lines = []
        checked = self.documents - self.unchecked
        if checked or not (self.paragraphs or self.unchecked):
            gone = checked - self.removed
            what = f"{self.removed:,} left out, {gone:,} not in the corpus"
            if not self.removed:
                what = "not one of them is in the corpus"
            some = ", ".join(map(repr, self.missing[:_NAMED]))
            more = f" ({some}{', …' if gone > _NAMED else ''})" if some else ""
            lines.append(f"absent: all {checked:,} documents of {self.named}: {what}{more}")
        if self.paragraphs:
            how = "judging by the numbers cut"
            lines.append(f"absent: all {self.paragraphs:,} paragraphs of {self.named}, {how}")
        if self.unchecked:
            lines.append(f"not checked: {self.unchecked:,} listed documents with equal ids")
        if self.elsewhere:
            lines.append(f"{self.named}: {self.elsewhere:,} entries are of other corpora")
        return "\n".join(lines)


class Sought:
    """The lists that a cache is checked against: its `own`, by path, and those given.

    A given list that is in force is the cache's copy, which has the ids of this corpus.
    """

    def __init__(self, own: Sequence[str], given: Sequence[Given], plan: Plan, scratch: str):
        self._own, self._given, self._files = len(own), given, plan.file_names
        self._lists = list(map(opened, own))
        shas = [each.sha256 for each in plan.exclude or ()]
        in_force = {each.header.get(OF): number for number, each in enumerate(self._lists)}
        if len(own) == len(shas):
            in_force |= {sha256: number for number, sha256 in enumerate(shas)}
        self.more: list[str] = []  # paths of the lists that are not in force
        self._of_given: list[int | None] = []  # their numbers; None: of another corpus
        for each in given:
            number = in_force.get(each.record.sha256)
            if number is None and (path := _path_here(each, plan, scratch)):
                number = len(self._lists)
                self._lists.append(opened(path))
                self.more.append(path)
            self._of_given.append(number)
        self._present: list[Present] = []
        self._removed: set[tuple[int, int]] = set()

    def add(self, checked: Checked) -> None:
        self._present += checked.present
        self._removed |= checked.removed

    def faults(self) -> Iterator[Fault]:
        """Yields a fault for each shard that holds a listed document.

        A list with origins names one document; if that was left out, another has the same id.
        """
        by_file: dict[tuple[str, bool], dict[str, None]] = defaultdict(dict)
        for each in self._present:
            twice = self._lists[each.list].origins and (each.list, each.entry) in self._removed
            if not twice:
                by_file[each.file, each.list < self._own][each.id] = None
        for (file, is_own), ids in by_file.items():
            yield listed(file, list(ids), "documents", HAS_LIST if is_own else EXCLUDE)

    def absences(self) -> list[Absence]:
        return [
            self._absence(each, number)
            for each, number in zip(self._given, self._of_given, strict=True)
        ]

    def _absence(self, each: Given, number: int | None) -> Absence:
        documents, paragraphs = each.sizes
        if number is None:
            return Absence(each.named, 0, 0, 0, 0, [], documents + paragraphs)
        of_cache = self._lists[number]
        counts = of_cache.header["counts"]
        removed = {entry for of, entry in self._removed if of == number}
        places = counts["places"] and sum(
            row["place"] > 0 and at not in removed for at, row in enumerate(of_cache)
        )
        missing = []
        ids_of = annexes.get(targets.SLOT, "ids_of")
        for line in each.lines or ():
            digests = id_digests(ids_of(line, self._files) if ids_of else [line])
            numbers = {entry.number for digest in digests for entry in of_cache.entries(digest)}
            if numbers and not numbers & removed:
                missing.append(line)
        elsewhere = of_cache.header.get(OF_ENTRIES, 0) and (
            of_cache.header[OF_ENTRIES] - counts["documents"] - counts["paragraphs"]
        )
        sizes = counts["documents"], counts["paragraphs"]
        return Absence(each.named, *sizes, len(removed), places, missing, elsewhere)


def _path_here(each: Given, plan: Plan, scratch: str) -> str | None:
    """Returns the path of a list as the corpus of a cache sees it; None if it is of another."""
    target = targets.Target(origins.of_record(plan.corpus), plan.corpus)
    found = targets.fitted([dataclasses.replace(each, again=True)], {"": target}, scratch)
    return found[""][0].path if found[""] else None
