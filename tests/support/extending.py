"""The examples of docs/extending.md, which tests add to the project as the page says."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "extending.md"


def example(heading: str) -> str:
    """Returns the first block of Python under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?\S.*?)```", section, re.DOTALL)
    assert found, f"{PAGE.name} has no example under {heading!r}"
    return found[1]
