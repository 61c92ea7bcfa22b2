"""Damage to files."""

import os
import pathlib
import random
from collections.abc import Callable


def _flip_bit(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    return bytes(changed)


# Name -> the file's new bytes; None removes the file.
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes] | None] = {
    "bit": _flip_bit,
    "cut": lambda data, generator: data[: generator.randrange(len(data))],
    "zeros": lambda data, _: bytes(len(data)),
    "gone": None,
}


def damage(path: pathlib.Path, kind: str, generator: random.Random) -> None:
    """Damages a file that is not empty; `kind` is a key of DAMAGES."""
    data, change = path.read_bytes(), DAMAGES[kind]
    path.unlink()
    if change:
        path.write_bytes(change(data, generator))


def any_file(folder: pathlib.Path, generator: random.Random) -> pathlib.Path:
    """Returns a random file in a folder, or below it, that is not empty."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return generator.choice(sorted(paths))


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(old: str, new: str) -> Callable[[pathlib.Path], object]:
    """Returns a function that replaces a text of a file once."""
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))
