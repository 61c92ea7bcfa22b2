"""Finds listed documents in a shard's files: those that it holds, and those that were left out."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from pipeline.exclusion.filter import NOTHING_LEFT, Filter, Found, base
from pipeline.exclusion.lists import EXCLUDED
from tasks.cache.filtered import FILTERED


@dataclasses.dataclass(frozen=True)
class Traces:
    """The ids in a shard's lineage, and its quarantined documents, each with id and reason."""

    names: Sequence[str]
    firsts: Sequence[int]  # indices in `names` of the first pieces of documents
    quarantined: Sequence[dict[str, Any]]
    files: Collection[str] = ()  # names of the corpus's files

    def present(self, lists: Filter) -> list[Found]:
        """Returns which of the documents that `lists` leave out are in the shard."""
        left_out = [
            line["id"]
            for line in self.quarantined
            if _was_cut(line["reason"]) or _may_be_cut(line["reason"])
        ]
        return lists.present(self.names, left_out, self.files)

    def removed(self, lists: Filter) -> list[Found]:
        """Returns which of the documents that `lists` leave out were left out."""
        some = [line for line in self.quarantined if is_excluded(line["reason"])]
        places = [line["location"] for line in some]
        found = lists.found([line["id"] for line in some], places)
        return found + lists.found([base(line["id"]) for line in some], places)

    def cuts(self, lists: Filter) -> tuple[int, int]:
        """Returns the least and the greatest number of paragraphs that `lists` cut."""
        # A build cuts paragraphs first, even from documents it then drops.
        read = [self.names[row] for row in self.firsts]
        read += [line["id"] for line in self.quarantined if _was_cut(line["reason"])]
        least = sum(map(len, lists.paragraphs(read, every_place=False).values()))
        read += [line["id"] for line in self.quarantined if _may_be_cut(line["reason"])]
        return least, sum(map(len, lists.paragraphs(read, every_place=True).values()))

    def hold(self, lists: Filter, cut: int) -> bool:
        """Returns whether the shard, with `cut` paragraphs cut, is as `lists` make it."""
        least, most = self.cuts(lists)
        others = [line for line in self.quarantined if not is_excluded(line["reason"])]
        ids, places = ([line[key] for line in others] for key in ("id", "location"))
        return least <= cut <= most and not self.present(lists) and not lists.found(ids, places)


def is_excluded(reason: str) -> bool:
    """Returns whether a document was left out because a list names it as a whole."""
    return reason.startswith(EXCLUDED) and not reason.endswith(NOTHING_LEFT)


def _was_cut(reason: str) -> bool:
    """Returns whether a document was dropped after its listed paragraphs were cut."""
    return reason.endswith(NOTHING_LEFT) or reason.startswith(FILTERED)


def _may_be_cut(reason: str) -> bool:
    """Returns whether paragraphs may have been cut, which needs a readable text."""
    return not _was_cut(reason) and not reason.startswith(EXCLUDED)
