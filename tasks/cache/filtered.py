"""The filters of a cache, as recorded in its plan."""

import dataclasses
from typing import Any

# Prefix of filter reasons in receipts and reports: such documents are not faulty.
FILTERED = "filtered: "


@dataclasses.dataclass(frozen=True)
class FilterRecord:
    """Rules that a cache's texts passed, and edits made to them.

    Attributes:
      name: the set's name.
      label: name in reasons: "filtered: LABEL RULE".
      version: version of the rules.
      unicode: Unicode version, which defines letters and spaces.
      settings: every setting, by name; None for disabled rules.
    """

    name: str
    label: str
    version: int
    unicode: str
    settings: dict[str, Any]
