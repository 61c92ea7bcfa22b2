"""The recipes that come with this project, by name."""

import functools
import os
import pathlib
import re
from collections.abc import Mapping

from tasks.terminal import toml_flags
from tasks.terminal.command_line import UserError, nearest

SUFFIX = ".toml"
# A word without a dot or a slash, as after `palimpsest run`, is a name and no file.
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@functools.cache
def files() -> Mapping[str, pathlib.Path]:
    """Returns the files of the recipes by name, in a clone or an installed wheel."""
    here = pathlib.Path(__file__).parent
    folder = here / "files"  # of the wheel
    if not folder.is_dir():
        folder = here.parents[2] / "recipes"
    return {path.stem: path for path in sorted(folder.glob(f"*{SUFFIX}"))}


def find(word: str) -> pathlib.Path | None:
    """Returns the file of the recipe that a word of a command line names; None if it is a path.

    Raises UserError if there is no such recipe or file, or if both are there.
    """
    if not _NAME.fullmatch(word):
        name = pathlib.PurePath(word).stem.lower()
        if name in files() and not os.path.exists(word):
            raise UserError(
                f"there is no file {word}; palimpsest run {name} runs Palimpsest's recipe"
            )
        return None
    file = next(filter(os.path.isfile, (word, f"{word}{SUFFIX}")), "")
    if word not in files():
        if os.path.exists(word):
            return None
        known = [*files(), file] if file else files()
        name = f" (did you mean {file}?)" if file else nearest(word.lower(), known)
        raise UserError(
            f"there is no recipe {word}{name}; palimpsest recipes lists them, and a file is given "
            f"as FILE{SUFFIX}"
        )
    if file:
        raise UserError(
            f"{word} is a recipe of Palimpsest, and {file} is also a file here: give ./{file} to "
            "run the file, or run the other in another folder"
        )
    return files()[word]


def text(name: str) -> str:
    """Returns the text of a recipe; raises UserError if there is none of this name."""
    if name not in files():
        near = nearest(pathlib.PurePath(name).stem.lower(), files())
        raise UserError(f"there is no recipe {name}{near}; known: {', '.join(files())}")
    return toml_flags.text_of(files()[name])
