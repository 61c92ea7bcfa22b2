"""Parameters of tests of which some cases are slow."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(
    fast: Collection[Any], cases: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.slow
) -> list[Any]:
    """Returns `cases` for pytest.mark.parametrize; those that are not in `fast` have the mark."""
    return [
        case
        if case in fast
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=mark)
        for case in cases
    ]
