"""The filters of a cache, as its plan records them."""

import dataclasses
from typing import Any

from tasks.cache.checked_json import check_count, check_form, check_keys

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


_KEYS = frozenset(each.name for each in dataclasses.fields(FilterRecord))


def filters_from_list(value: Any) -> tuple[FilterRecord, ...]:
    """Inverse of dataclasses.asdict; raises a UserError if a record was damaged or edited."""
    for each in check_form(value, list, "filters", "a list"):
        check_keys(each, "filters", _KEYS)
        for name in ("name", "label", "unicode"):
            check_form(each[name], str, f"filters.{name}", "a text")
        check_count(each["version"], "filters.version")
        check_form(each["settings"], dict, "filters.settings", "an object")
    return tuple(FilterRecord(**each) for each in value)
