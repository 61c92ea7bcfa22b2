"""Files and folders that stay the same when Python's current folder changes."""

import os

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.texts import shown


class Place:
    """A path as it was given, or the absolute one once the current folder is another.

    As long as nothing changes, what commands record of it is what was given.
    """

    def __init__(self, given: str | os.PathLike[str]):
        if not isinstance(given, str | os.PathLike) or not os.fspath(given):
            raise UserError(f"{shown(given)}: it must be the path of a file or a folder")
        self.given = os.fspath(given)
        self._absolute = _absolute(self.given)

    def __fspath__(self) -> str:
        return self._absolute if self.moved else self.given

    @property
    def moved(self) -> bool:
        """True if the given path now leads elsewhere."""
        return _absolute(self.given) != self._absolute


def _absolute(path: str) -> str:
    return path if files.is_remote(path) else os.path.abspath(files.local_path(path))
