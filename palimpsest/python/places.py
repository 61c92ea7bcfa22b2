"""Files and folders that stay the same when Python's current folder changes."""

import os

from tasks.storage import files


class Place:
    """A path as it was given, or the absolute one once the current folder is another.

    As long as nothing changes, what commands record of it is what was given.
    """

    def __init__(self, given: str | os.PathLike[str]):
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
