"""The file of bearer tokens, in TOML: a table for each holder, with a token's SHA-256.

`tasks` lists names or patterns such as "c4_*", all tasks if it is left out; `expires` is a date or
time, such as 2027-01-31.
"""

import dataclasses
import datetime
import fnmatch
import hashlib
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

from tasks.terminal import toml_flags
from tasks.terminal.command_line import UserError

_BEARER = "bearer "


@dataclasses.dataclass(frozen=True)
class Holder:
    """Who holds a token, and which tasks it may read until when, in UTC; None means ever."""

    name: str
    tasks: tuple[str, ...] = ("*",)
    expires: datetime.datetime | None = None

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.datetime.now(datetime.UTC) >= self.expires

    def may_read(self, task: str) -> bool:
        """Returns whether one of the patterns of tasks matches a task's name."""
        return any(fnmatch.fnmatchcase(task, pattern) for pattern in self.tasks)


# Everybody, where no tokens are asked for.
ANYBODY = Holder("anybody")


class Refused(UserError):
    """A call without a valid token."""


class Tokens:
    """The holders of a file of tokens, read again when the file changes.

    A file that became unreadable is named on stderr, and the holders before are kept.
    """

    def __init__(self, path: str):
        """Raises UserError if the file is missing or wrong."""
        self._path = pathlib.Path(path)
        self._state, self._holders = self._written(), read(self._path)

    def _written(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size

    def holder(self, authorization: str) -> Holder:
        """Returns the holder of the token in a header "Bearer TOKEN"; raises Refused without."""
        state = self._written()
        if state != self._state:
            self._state = state
            try:
                self._holders = read(self._path)
            except UserError as error:
                print(f"palimpsest serve: {error}; its former tokens stay", file=sys.stderr)
        if not authorization.lower().startswith(_BEARER):
            raise Refused("this server needs a token: set PALIMPSEST_TOKEN")
        token = authorization[len(_BEARER) :].strip()
        found = self._holders.get(hashlib.sha256(token.encode()).hexdigest())
        if found is None:
            raise Refused("the token is unknown here: ask who runs the server for another")
        if found.expired:
            raise Refused(f"the token of {found.name} has expired: ask who runs the server")
        return found


def read(path: pathlib.Path) -> Mapping[str, Holder]:
    """Returns SHA-256 -> holder; raises UserError if the file is not as the module says."""
    found: dict[str, Holder] = {}
    for name, value in toml_flags.read(path).items():
        digest, holder = _holder(path, name, value)
        if digest in found:
            raise UserError(f"{path}: {found[digest].name} and {name} have one token")
        found[digest] = holder
    if not found:
        raise UserError(f'{path} has no tokens: add a table [NAME] with sha256 = "…"')
    return found


def _holder(path: pathlib.Path, name: str, value: Any) -> tuple[str, Holder]:
    if not (isinstance(value, dict) and value.keys() <= {"sha256", "tasks", "expires"}):
        raise UserError(f"{path}: {name} must be a table with sha256, tasks and expires")
    digest, tasks = value.get("sha256"), value.get("tasks", ["*"])
    if not (isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise UserError(f"{path}: sha256 of {name} must be the 64 digits that sha256sum prints")
    if not (isinstance(tasks, list) and all(isinstance(each, str) for each in tasks)):
        raise UserError(f"{path}: tasks of {name} must be a list of names or patterns")
    return digest, Holder(name, tuple(tasks), _moment(path, name, value.get("expires")))


def _moment(path: pathlib.Path, name: str, value: Any) -> datetime.datetime | None:
    if value is None:
        return None
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo else value.replace(tzinfo=datetime.UTC)
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC)
    raise UserError(f"{path}: expires of {name} must be a date or time, such as 2027-01-31")
