"""The filters of a cache, as its plan records them."""

import dataclasses
from typing import Any

# How reasons of filters begin in receipts and reports: such documents are not faulty.
FILTERED = "filtered: "


@dataclasses.dataclass(frozen=True)
class FilterRecord:
    """A set of rules that texts of a cache passed, and of edits that were made to them.

    Attributes:
      name: the set's name.
      label: how reasons call it, as "filtered: LABEL RULE".
      version: version of the rules.
      unicode: version of Unicode, which says what letters and spaces are.
      settings: every setting, by name; None for rules that are off.
    """

    name: str
    label: str
    version: int
    unicode: str
    settings: dict[str, Any]
