"""The lists of documents that are left out of a cache, as its plan records them."""

import dataclasses


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
