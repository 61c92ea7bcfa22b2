"""Prints the rent book: folders, their lines now and at another commit, and their budgets.

    python scripts/rent.py [--since=COMMIT] [--write]

dev/budget.toml has the budgets, which tests/test_budget.py holds. `--write` lowers them to what is
there now; to raise one is an edit, which a reviewer sees.
"""

import argparse
import pathlib
import subprocess
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
BOOK = ROOT / "dev" / "budget.toml"
PACKAGES = ("palimpsest", "vocab", "tasks", "pipeline", "trainer")
OTHERS = ("benchmarks", "docker", "examples", "experiments", "scripts")
ANNEXES = "annexes"


def room(path: pathlib.PurePath) -> str:
    """Returns the folder whose budget a file of Python uses, relative to the root."""
    parts = path.parts
    if parts[0] in (*OTHERS, "tests"):
        return parts[0]
    if parts[1:2] == (ANNEXES,):
        return "/".join(parts[:3]) if len(parts) > 3 else f"{parts[0]}/{ANNEXES}"
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def is_annex(folder: str) -> bool:
    return folder.split("/")[1:2] == [ANNEXES] and folder.count("/") > 1  # the registry is core


def lines() -> dict[str, int]:
    """Returns folder -> lines of Python in it now."""
    found: dict[str, int] = {}
    for top in (*PACKAGES, *OTHERS, "tests"):
        for file in sorted((ROOT / top).rglob("*.py")):
            folder = room(file.relative_to(ROOT))
            found[folder] = found.get(folder, 0) + file.read_text("utf-8").count("\n")
    return found


def words() -> int:
    """Returns the words of the docs, without decisions."""
    pages = (ROOT / "docs").rglob("*.md")
    texts = (page.read_text("utf-8") for page in pages if "decisions" not in page.parts)
    return sum(len(text.split()) for text in texts)


def totals(found: dict[str, int]) -> dict[str, int]:
    """Returns the lines of the core, of all but the tests and of the tests; and the docs' words."""
    every = sum(found.values()) - found["tests"]
    others = (found[folder] for folder in found if folder in OTHERS or is_annex(folder))
    return {
        "core": every - sum(others),
        "packages": every,
        "tests": found["tests"],
        "words": words(),
    }


def before(commit: str) -> dict[str, int]:
    """Returns folder -> lines of Python at a commit."""

    def git(*more: str) -> str:
        return subprocess.run(
            ["git", *more], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout

    found: dict[str, int] = {}
    for name in git("ls-tree", "-r", "--name-only", commit).splitlines():
        path = pathlib.PurePath(name)
        if path.suffix == ".py" and path.parts[0] in (*PACKAGES, *OTHERS, "tests"):
            folder = room(path)
            found[folder] = found.get(folder, 0) + git("show", f"{commit}:{name}").count("\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", metavar="COMMIT", help="also print the lines at a commit")
    parser.add_argument("--write", action="store_true", help="lower the budgets to what is there")
    flags = parser.parse_args()
    book, now = tomllib.loads(BOOK.read_text("utf-8")), lines()
    then = before(flags.since) if flags.since else {}
    for folder in sorted({*now, *then}):
        budget, reason = book["folders"].get(folder, ("", ""))
        was = f"{then.get(folder, 0):>8,}" if then else ""
        print(f"{folder:<36}{was}{now.get(folder, 0):>8,}{budget or 0:>8,}  {reason}")
    for name, count in totals(now).items():
        goal = f"goal {book['goals'][name]:,}" if name in book["goals"] else ""
        print(f"{name:<36}{count:>16,}{book['totals'][name]:>8,}  {goal}")
    if flags.write:
        BOOK.write_text(written(book, now), "utf-8")


def written(book: dict, now: dict[str, int]) -> str:
    """Returns the book with budgets no higher than what is there, in steps of ten lines."""
    head = BOOK.read_text("utf-8").partition("[totals]")[0]
    sums = totals(now)

    def least(old: int | None, count: int) -> int:
        up = -(-count // 10) * 10
        return up if old is None else min(old, up)

    out = [f"{head}[totals]"]
    out += [f"{name} = {least(book['totals'].get(name), sums[name])}" for name in sums]
    out += ["", "[goals]", *(f"{name} = {goal}" for name, goal in book["goals"].items())]
    out += ["", "[folders]"]
    for folder in sorted(now):
        old, reason = book["folders"].get(folder, (None, "?"))
        out.append(f'"{folder}" = [{least(old, now[folder])}, "{reason}"]')
    return "\n".join([*out, ""])


if __name__ == "__main__":
    main()
