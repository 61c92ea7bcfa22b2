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
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What is of the whole tree: its docs, experiments with models of annexes, and tests of these and of
# the tree's tables, images and peers.
_WHOLE = (
    *("docs", "tests/test_docs.py", "tests/test_migrating.py", "tests/test_migrating_from_t5x.py"),
    *("tests/test_budget.py", "tests/test_images.py", "tests/test_peers.py"),
    *("experiments", "tests/experiments", "tests/trainer/test_migrants_errands.py"),
)
_READ = ("docs/extending.md", "docs/adapters.md")


def known() -> dict[str, list[str]]:
    """Returns name -> the paths of an annex, relative to the root."""
    found = {}
    for file in sorted(ROOT.glob("*/annexes/*/annex.toml")):
        folder = file.parent.relative_to(ROOT)
        found[folder.name] = [str(folder), str(pathlib.Path("tests", folder))]
    return found


def with_dependents(names: list[str]) -> list[str]:
    """Returns annexes and those that need one of them, directly or not."""
    from tasks import annexes

    found = list(dict.fromkeys(names))
    for name in found:
        needing = (annex.name for annex in annexes.annexes() if name in annex.needs)
        found += [each for each in needing if each not in found]
    return found


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


def traces(output: pathlib.Path, names: list[str], commands: list[str]) -> list[str]:
    """Returns what --help of the copy still says about the deleted annexes."""
    python = [sys.executable, "-m", "palimpsest"]
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
        for name, paths in annexes.items():
            print(f"{name:<20} {paths[0]:<36} {lines(paths[:1])[1]:>6,} lines")
        return 0
    if unknown := [name for name in flags.names if name not in annexes]:
        parser.error(f"no annex {unknown[0]}; known: {', '.join(annexes)}")
    if flags.output is None or flags.output.exists():
        parser.error("--output must be a new folder")
    flags.names = with_dependents(flags.names)
    deleted = [path for name in flags.names for path in annexes[name]]
    copy(flags.output, [*deleted, *_WHOLE])
    files, count = lines([path for name in flags.names for path in annexes[name][:1]])
    print(f"without {', '.join(flags.names)}: {files} files, {count:,} lines")
    failed = traces(flags.output, flags.names, _commands(flags.names))
    print("\n".join(f"trace: {each}" for each in failed) or "no trace in --help", flush=True)
    if not flags.test:
        return bool(failed)
    began = time.monotonic()
    words = ["--numprocesses=2", "--dist=loadfile", "-m", "not slow and not processes"]
    command = [sys.executable, "-m", "pytest", *words, *flags.pytest.split()]
    code = subprocess.run(command, cwd=flags.output, env=_environment(flags.output)).returncode
    print(f"tests: {'passed' if not code else f'code {code}'}, {time.monotonic() - began:.0f} s")
    return bool(failed or code)


def _commands(names: list[str]) -> list[str]:
    """Returns the commands of annexes."""
    from tasks import annexes

    return [
        command
        for annex in annexes.annexes()
        if annex.name in names
        for slot, entries in annex.slots.items()
        if slot.startswith("commands.")
        for command in entries
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
