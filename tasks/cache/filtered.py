"""The filters and exclude lists of a cache, as recorded in its plan."""

import dataclasses
from typing import Any

# Prefix of the reasons that filters give in receipts and reports; such documents are not faulty.
FILTERED = "filtered: "


@dataclasses.dataclass(frozen=True)
class FilterRecord:
    """Rules that a cache's texts passed, and edits made to them."""

    name: str  # the set's name
    label: str  # name in reasons: "filtered: LABEL RULE"
    version: int  # version of the rules
    unicode: str  # Unicode version, which defines letters and spaces
    settings: dict[str, Any]  # every setting, by name; None for disabled rules


@dataclasses.dataclass(frozen=True)
class ExcludeRecord:
    """A list of excluded documents; the cache has a copy of it."""

    sha256: str  # checksum of the list, in hexadecimal
    kind: str  # "duplicates" for a list that says which twins are kept, else "ids"
    # documents, paragraphs: number of entries of each kind.
    documents: int
    paragraphs: int
