"""Rows that annexes add to tables of the core's tests: tests/PACKAGE/annexes/NAME/cases.py.

An annex that is deleted takes its rows along.
"""

import importlib
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def rows(table: str) -> list[Any]:
    """Returns the rows of all annexes for a table that is a list."""
    found = []
    for path in sorted(ROOT.glob("tests/*/annexes/*/cases.py")):
        cases = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found += [*getattr(cases, table, ())]
    return found


def entries(table: str) -> dict[str, Any]:
    """Returns the entries of all annexes for a table that is a dict."""
    found: dict[str, Any] = {}
    for path in sorted(ROOT.glob("tests/*/annexes/*/cases.py")):
        cases = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        found |= getattr(cases, table, {})
    return found
