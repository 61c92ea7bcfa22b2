"""The lists of documents that are left out of a cache, as its plan records them."""

import dataclasses
from typing import Any

from tasks.cache.checked_json import check_count, check_form, check_keys


@dataclasses.dataclass(frozen=True)
class ExcludeRecord:
    """A list of documents that are left out of a cache; the cache has a copy of it.

    Attributes:
      sha256: checksum of the list, in hexadecimal.
      kind: "duplicates" of a list that tells which twins are kept, "ids" of any other.
      documents, paragraphs: number of entries of either kind.
    """

    sha256: str
    kind: str
    documents: int
    paragraphs: int


_KEYS = frozenset(each.name for each in dataclasses.fields(ExcludeRecord))


def exclude_from_list(value: Any) -> tuple[ExcludeRecord, ...]:
    """Inverse of dataclasses.asdict; raises a UserError if a record was damaged or edited."""
    for each in check_form(value, list, "exclude", "a list"):
        check_keys(each, "exclude", _KEYS)
        check_form(each["sha256"], str, "exclude.sha256", "a checksum")
        check_form(each["kind"], str, "exclude.kind", "a kind of list")
        for name in ("documents", "paragraphs"):
            check_count(each[name], f"exclude.{name}")
    return tuple(ExcludeRecord(**each) for each in value)
