"""Options of the whole test suite."""

from pathlib import Path

import hypothesis
import pytest

# A test's time is the machine's; what is fast is measured in benchmarks/.
hypothesis.settings.register_profile("palimpsest", deadline=None)
hypothesis.settings.load_profile("palimpsest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        type=Path,
        default=Path(__file__).parent / "golden" / "reference",
        metavar="DIR",
        help="folder of T5X arrays the golden tests are held against (default: %(default)s)",
    )
    parser.addoption(
        "--corpus",
        default="python_docs",
        metavar="SPEC",
        help="corpus whose text the trainer's tests train on, as pipeline.build's --corpus "
        "(default: %(default)s)",
    )
