"""Results as data frames."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.terminal import extras

if TYPE_CHECKING:
    from pandas import DataFrame


def frame(
    rows: Sequence[Mapping[str, Any]], index: Sequence[str] = (), columns: Sequence[str] = ()
) -> "DataFrame":
    """Returns a data frame of rows; without `columns`, the rows name them."""
    with extras.needed("a data frame", "pipeline"):
        from pandas import DataFrame
    made = DataFrame(rows, columns=[*columns] or None)
    return made.set_index([*index]) if index and rows else made
