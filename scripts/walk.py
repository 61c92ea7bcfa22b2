"""Counts the places that a run's start visits, from `palimpsest pretrain` to its first batch.

    python scripts/walk.py [--show] [-- FLAGS OF PRETRAIN]

It builds a small cache, then runs the command under `sys.setprofile` and stops where the first
batch is put on the devices. It follows the main thread through our own functions, each at its
first call: a *place* is a function, and a *stay* is a stretch of such calls in one file. Without
flags, the run is `--preset=t5_1_1_tiny` on span corruption. The last line also says whether a
module of an annex was imported, other than the dataclasses of its flags.
"""

import collections
import contextlib
import inspect
import io
import itertools
import os
import pathlib
import sys
import tempfile
from types import FrameType
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("palimpsest", "pipeline", "tasks", "trainer", "vocab")
_RUN = ("--preset=t5_1_1_tiny", "--batch_size=8", "--lengths.inputs=64", "--lengths.targets=32")


class _First(BaseException):
    """The first batch is ready."""


class Walk:
    """The functions of ours that are called, in the order of their first calls."""

    def __init__(self) -> None:
        self.places: dict[tuple[str, str, int], None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # unlike the body of a class
        if event != "call" or not is_function or not code.co_filename.startswith(f"{ROOT}/"):
            return
        file = code.co_filename[len(f"{ROOT}/") :]
        if file.split("/")[0] in PACKAGES and not code.co_name.startswith("<"):
            self.places.setdefault((file, code.co_qualname, code.co_firstlineno))

    def files(self) -> collections.Counter[str]:
        return collections.Counter(file for file, _, _ in self.places)

    def stays(self) -> int:
        return sum(1 for _ in itertools.groupby(self.places, lambda place: place[0]))


def walk(folder: str, flags: list[str]) -> Walk:
    """Builds a cache in `folder`, if the run names none, and walks to the run's first batch."""
    from trainer.engine.program import Program

    if not any(flag.startswith("--cache_dir") for flag in flags):
        from pipeline.build import main as build

        (pathlib.Path(folder) / "text.txt").write_text("One line of text.\n" * 2000)
        with contextlib.redirect_stdout(io.StringIO()):
            build([
                "--task=span_corruption", "--name=walk", "--vocabulary=bytes", "--extra_ids=100",
                f"--corpus=text:{folder}/text.txt?validation=0.1", f"--cache_dir={folder}/cache",
            ])  # fmt: skip
        flags = ["--task=walk_span_corruption", f"--cache_dir={folder}/cache", *flags]

    def first(*_: Any) -> Any:
        raise _First

    Program.put = first  # type: ignore[method-assign]
    found = Walk()
    from palimpsest.__main__ import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(_First):
        sys.setprofile(found)
        try:
            main(["pretrain", *flags, f"--model_dir={folder}/model", "--train_steps=2"])
        finally:
            sys.setprofile(None)
    return found


def main() -> None:
    words = sys.argv[1:]
    show = "--show" in words
    flags = [word for word in words if word not in ("--show", "--")] or [*_RUN]
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        found = walk(folder, flags)
    for file, count in found.files().most_common() if show else ():
        print(f"{count:>4}  {file}")
    loaded = [name for name in sys.modules if ".annexes." in name and name.count(".") > 2]
    others = [name for name in loaded if not name.endswith(".options")]
    print(
        f"{len(found.places)} places in {len(found.files())} files, {found.stays()} stays; "
        f"modules of annexes: {', '.join(others) or 'none'}"
    )


if __name__ == "__main__":
    main()
