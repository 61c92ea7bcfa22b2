"""Rows that annexes add to tables of the core's tests: tests/PACKAGE/annexes/NAME/cases.py.

An annex that is deleted takes its rows along.
"""

import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def rows(table: str) -> list[Any]:
    """Returns the rows of all annexes for a table that is a list."""
    return [row for each in _tables(table) for row in each]


def entries(table: str) -> dict[str, Any]:
    """Returns the entries of all annexes for a table that is a dict."""
    return {name: entry for each in _tables(table) for name, entry in each.items()}


def _tables(name: str) -> Iterator[Any]:
    for path in sorted(ROOT.glob("tests/*/annexes/*/cases.py")):
        cases = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if hasattr(cases, name):
            yield getattr(cases, name)
