"""The exclude lists of a cache, as recorded in its plan."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExcludeRecord:
    """A list of excluded documents; the cache has a copy of it.

    Attributes:
      sha256: checksum of the list, in hexadecimal.
      kind: "duplicates" for a list that says which twins are kept, else "ids".
      documents, paragraphs: number of entries of either kind.
    """

    sha256: str
    kind: str
    documents: int
    paragraphs: int
