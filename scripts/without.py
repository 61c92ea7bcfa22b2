"""Makes a copy of this checkout without some annexes, and checks that the rest needs none of them.

    python scripts/without.py planning comparing --output=/tmp/copy --test
    python scripts/without.py --all --output=/tmp/core --test
    python scripts/without.py --drawn=SEED --output=/tmp/copy --test

An annex is deleted with its folder, its tests, tests/PACKAGE/annexes/NAME, and the annexes that
need it. The copy has no docs, which describe the whole, but for the examples that tests read.
`--test` runs what `make test` runs in the copy, whose packages replace the installed ones, and
checks that no --help has a trace of the deleted. The exit code is 1 if anything fails. Without
names it lists the annexes.
"""

import argparse
import itertools
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What is of the whole tree: its docs, experiments with models of annexes, and tests of these and of
# the tree's tables, images and peers.
_WHOLE = (
    *("docs", "tests/test_docs.py", "tests/test_migrating.py", "tests/test_migrating_from_t5x.py"),
    *("tests/test_budget.py", "tests/test_images.py", "tests/test_peers.py"),
    *("experiments", "tests/experiments", "tests/trainer/test_migrants_errands.py"),
)
_READ = ("docs/extending.md", "docs/adapters.md")


def known() -> dict[str, Any]:
    """Returns the annexes of this checkout by name, as tasks.annexes reads them."""
    from tasks import annexes

    return {annex.name: annex for annex in annexes.annexes() if annex.folder.is_relative_to(ROOT)}


def places(annex: Any) -> list[str]:
    """Returns the folders of an annex and of its tests, relative to the root."""
    folder = annex.folder.relative_to(ROOT)
    return [str(folder), str(pathlib.Path("tests", folder))]


def with_dependents(names: list[str]) -> list[Any]:
    """Returns the annexes of these names, and those that need one of them, directly or not."""
    annexes, found = known(), list(dict.fromkeys(names))
    for name in found:
        found += [other for other in annexes if name in annexes[other].needs and other not in found]
    return [annexes[name] for name in found]


def lines(paths: list[str]) -> tuple[int, int]:
    """Returns (files, lines) of Python below some paths."""
    files = [file for path in paths for file in (ROOT / path).rglob("*.py")]
    return len(files), sum(file.read_text("utf-8").count("\n") for file in files)


def copy(output: pathlib.Path, deleted: list[str]) -> None:
    """Copies the files that git has or would add, without the deleted ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    gone = tuple(f"{path}/" for path in deleted)
    for name in listed.splitlines():
        kept = name in _READ or not (name.startswith(gone) or name in deleted)
        if not kept or not (ROOT / name).is_file():
            continue
        target = output / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    for library in (ROOT / "pipeline/native").glob("core.*.so"):
        shutil.copy2(library, output / "pipeline/native")


def traces(output: pathlib.Path, deleted: list[Any]) -> list[str]:
    """Returns what --help of the copy still says about the deleted annexes."""
    python = [sys.executable, "-m", "palimpsest"]
    slots = [slot for annex in deleted for slot in annex.slots.items()]
    commands = [name for slot, names in slots if slot.startswith("commands.") for name in names]
    found = []
    for words in (["--help"], ["pretrain", "--help=all"], ["build", "--help=all"]):
        done = subprocess.run([*python, *words], cwd=output, env=_environment(output),
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode:
            found.append(f"{' '.join(words)}: {done.stderr.strip()}")
        shown = done.stdout.splitlines()
        for command in commands:
            # The list of commands; in other pages, words of help may begin a line.
            listed = words == ["--help"]
            found += [line for line in shown if listed and line.startswith(f"  {command} ")]
            found += [line for line in shown if f"palimpsest {command} " in line]
    return found


def _environment(output: pathlib.Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(output), "JAX_PLATFORMS": "cpu"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="without any annex: the core alone")
    parser.add_argument("--drawn", metavar="SEED", help="without one annex, drawn at random")
    parser.add_argument("--output", type=pathlib.Path, help="a new folder for the copy")
    parser.add_argument("--test", action="store_true", help="run the tests of the copy")
    parser.add_argument("--pytest", default="", help="further words for pytest, such as a path")
    flags = parser.parse_args()
    annexes = known()
    if flags.all:
        flags.names = [*annexes]
    elif flags.drawn:
        flags.names = [random.Random(flags.drawn).choice([*annexes])]
    if not flags.names:
        for name, annex in annexes.items():
            folder, _ = places(annex)
            print(f"{name:<20} {folder:<36} {lines([folder])[1]:>6,} lines")
        return 0
    if unknown := [name for name in flags.names if name not in annexes]:
        parser.error(f"no annex {unknown[0]}; known: {', '.join(annexes)}")
    if flags.output is None or flags.output.exists():
        parser.error("--output must be a new folder")
    deleted = with_dependents(flags.names)
    copy(flags.output, [*itertools.chain(*map(places, deleted)), *_WHOLE])
    files, count = lines([places(annex)[0] for annex in deleted])
    print(f"without {', '.join(annex.name for annex in deleted)}: {files} files, {count:,} lines")
    failed = traces(flags.output, deleted)
    print("\n".join(f"trace: {each}" for each in failed) or "no trace in --help", flush=True)
    if not flags.test:
        return bool(failed)
    began = time.monotonic()
    words = ["--numprocesses=2", "--dist=loadfile", "-m", "not slow and not processes"]
    command = [sys.executable, "-m", "pytest", *words, *flags.pytest.split()]
    code = subprocess.run(command, cwd=flags.output, env=_environment(flags.output)).returncode
    print(f"tests: {'passed' if not code else f'code {code}'}, {time.monotonic() - began:.0f} s")
    return bool(failed or code)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
