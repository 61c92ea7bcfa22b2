"""Options of the whole test suite."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        type=Path,
        default=Path(__file__).parent / "golden" / "reference",
        metavar="DIR",
        help="folder of T5X arrays the golden tests are held against (default: %(default)s)",
    )
