"""What a shard's files say about listed documents: which it holds, and which were left out."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from pipeline.excluding.filter import NOTHING_LEFT, Filter
from pipeline.excluding.lists import EXCLUDED
from tasks.cache.filtered import FILTERED


@dataclasses.dataclass(frozen=True)
class Traces:
    """The ids in a shard's lineage, and its quarantined documents, each with id and reason."""

    names: Sequence[str]
    firsts: Sequence[int]  # indices in `names` of the first pieces of documents
    quarantined: Sequence[dict[str, Any]]

    def listed(self, lists: Filter) -> list[int]:
        """Returns indices in `names` of documents that `lists` leave out."""
        left_out = [
            line["id"]
            for line in self.quarantined
            if _was_cut(line["reason"]) or _may_be_cut(line["reason"])
        ]
        return lists.listed(self.names, left_out)

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
        others = [line["id"] for line in self.quarantined if not _is_excluded(line["reason"])]
        return least <= cut <= most and not self.listed(lists) and not lists.listed(others, [])


def _is_excluded(reason: str) -> bool:
    """Returns whether a document was left out because a list names it as a whole."""
    return reason.startswith(EXCLUDED) and not reason.endswith(NOTHING_LEFT)


def _was_cut(reason: str) -> bool:
    """Returns whether a document was dropped after its listed paragraphs were cut."""
    return reason.endswith(NOTHING_LEFT) or reason.startswith(FILTERED)


def _may_be_cut(reason: str) -> bool:
    """Returns whether paragraphs may have been cut, which needs a readable text."""
    return not _was_cut(reason) and not reason.startswith(EXCLUDED)
