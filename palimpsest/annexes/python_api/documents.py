"""Documents from Python: lists of texts or pairs, the lines of their file, and its name."""

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tasks.document_kind import SIDES
from tasks.reading import compression
from tasks.storage import files
from tasks.terminal import texts
from tasks.terminal.command_line import UserError

_TEXT = ("text",)
# A SPEC takes these for patterns, options, members of archives and languages.
_OF_SPECS = re.compile(r"\*|\?|::|\{language\}")
_KINDS = (
    "it must be a text, a pair of texts (inputs, targets), or a dict with "
    '"text", or with "inputs" and "targets"'
)


def several(given: Any, name: str) -> Iterator[Any]:
    """Returns an iterator over texts; raises UserError for one text, a data frame or a dict."""
    kind = type(given).__name__
    if hasattr(given, "columns"):
        raise UserError(f'{name}: a {kind} gives the names of its columns: pass frame["text"]')
    try:
        if not isinstance(given, str | bytes | Mapping):
            return iter(given)
    except TypeError:
        pass
    raise UserError(f"{name}: pass a list, or another iterable, of texts, not one {kind}")


def check_share(share: Any) -> float:
    """Returns the share of texts that is held out, if a SPEC may have it."""
    found = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        found = float(share)
    if not 0 <= found < 1:
        raise UserError(
            f"validation={texts.shown(share)}: it must be a number from 0 to 1, and less than 1"
        )
    return found


def check_name(path: str) -> None:
    """Raises UserError for the name of a file that a SPEC cannot name, or of a packed one."""
    texts.checked(path, "the path of the corpus")
    if found := _OF_SPECS.search(path):
        raise UserError(f"{path}: a SPEC reads {found[0]} in another way: choose another name")
    if os.path.basename(path).startswith("."):
        raise UserError(f"{path} is a hidden file, which no corpus reads: choose another name")
    if compression.named_packed(path):
        raise UserError(f"{path}: the file is not compressed: name it as in corpus.jsonl")


def write(lines: Iterable[bytes], path: str, overwrite: bool) -> None:
    """Writes a file, which stays as it is if it has these lines.

    Raises UserError, unless `overwrite`, if it has others.
    """
    if overwrite or not files.exists(path):
        with files.atomic_write(path) as file:
            file.writelines(lines)
        return
    with tempfile.TemporaryFile() as spool:
        spool.writelines(lines)
        spool.seek(0)
        if hashlib.file_digest(spool, "sha256").hexdigest() != files.sha256(path):
            raise UserError(f"{path} holds other texts: name another file, or pass overwrite=True")


class Lines:
    """The JSON lines of texts or of pairs; `pairs` says which, after iteration.

    Raises UserError for what is neither, for both, and for none; texts count from 1.
    """

    def __init__(self, given: Iterable[Any], place: str):
        self.pairs = False
        self._given, self._place = given, place

    def __iter__(self) -> Iterator[bytes]:
        number = 0
        for number, each in enumerate(self._given, 1):
            name = f"{self._place}: text {number} (from 1)"
            row = _row(each, name)
            pairs = SIDES[0] in row
            if number > 1 and pairs != self.pairs:
                raise UserError(f"{name}: give texts alone, or pairs of inputs and targets alone")
            self.pairs = pairs
            try:
                yield f"{json.dumps(row, ensure_ascii=False)}\n".encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"{name} has a member that JSON cannot hold: {error}") from error
        if not number:
            raise UserError(
                f"{self._place}: there is no text: give texts alone, or pairs of inputs and "
                "targets alone"
            )


def _row(given: Any, name: str) -> dict[Any, Any]:
    """Returns the object of a text or a pair; an object that is given keeps its other members."""
    if isinstance(given, str):
        given = dict(zip(_TEXT, [given], strict=True))
    elif isinstance(given, tuple | list) and len(given) == len(SIDES):
        given = dict(zip(SIDES, given, strict=True))
    row = dict(given) if isinstance(given, Mapping) else {}
    members = tuple(each for each in (*_TEXT, *SIDES) if each in row)
    if members not in (_TEXT, SIDES) or not all(isinstance(row[each], str) for each in members):
        raise UserError(f"{name} is {texts.shown(given)}: {_KINDS}")
    for member in members:
        texts.checked(row[member], name)
    return row
