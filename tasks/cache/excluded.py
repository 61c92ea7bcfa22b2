"""The exclude lists of a cache, as recorded in its plan."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExcludeRecord:
    """A list of excluded documents; the cache has a copy of it."""

    sha256: str  # checksum of the list, in hexadecimal
    kind: str  # "duplicates" for a list that says which twins are kept, else "ids"
    # documents, paragraphs: number of entries of either kind.
    documents: int
    paragraphs: int
