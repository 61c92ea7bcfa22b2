"""The examples of docs/extending.md, which tests add to the project as the page says."""

import pathlib
import re
from collections.abc import Mapping

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "extending.md"


def example(heading: str) -> str:
    """Returns the first block of Python under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.*?\S.*?)```", section, re.DOTALL)
    assert found, f"{PAGE.name} has no example under {heading!r}"
    return found[1]


def install(site: pathlib.Path, name: str, modules: Mapping[str, str], annex: str) -> None:
    """Writes a distribution that has an annex, as pip would install it into the folder `site`."""
    (site / name).mkdir()
    for file, text in {"__init__.py": "", "annex.toml": annex, **modules}.items():
        (site / name / file).write_text(text)
    (points := site / f"{name}-1.0.dist-info").mkdir()
    (points / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (points / "entry_points.txt").write_text(f"[palimpsest.annexes]\n{name} = {name}\n")
