"""Results as data frames."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tasks.inspection import decode
from tasks.terminal import extras
from tasks.vocabulary import TokenIds

if TYPE_CHECKING:
    from pandas import DataFrame

    from tasks.inspection.show import Sample


def example(sample: "Sample", ids: TokenIds) -> dict[str, str]:
    """Returns a row of a data frame of examples."""
    sides = {"text": sample.tokens}
    if sample.trace:
        sides |= {"inputs": sample.trace.inputs.tokens_L} if sample.trace.inputs else {}
        sides |= {"targets": sample.trace.targets.tokens_L}
    return {
        "example": sample.title,
        "documents": ", ".join(part.id for part in sample.parts),
        **{side: decode.spelled(tokens.tolist(), ids) for side, tokens in sides.items()},
    }


def frame(
    rows: Sequence[Mapping[str, Any]], index: Sequence[str] = (), columns: Sequence[str] = ()
) -> "DataFrame":
    """Returns a data frame of rows; without `columns`, the rows name them."""
    with extras.needed("a data frame", "pipeline"):
        from pandas import DataFrame
    made = DataFrame(rows, columns=[*columns] or None)
    return made.set_index([*index]) if index and rows else made
