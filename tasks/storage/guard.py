"""Writes that another process may forbid at any moment, and that can be taken back."""

import contextlib
import os
from collections.abc import Callable

from tasks.storage.paths import is_on_gcs, is_remote, local_path
from tasks.storage.store import Store


class Guard:
    """Permits writes while `check` raises nothing.

    In Cloud Storage, `check` is called when a file's generation is known, and the file is written
    only if it still has that generation, so that nothing can come between the look and the write.
    """

    def __init__(self, check: Callable[[], None]):
        self.check = check
        self._written: dict[str, str] = {}

    def upload(self, path: str, source: str) -> None:
        """Uploads a local file to a store."""
        self._written[path] = Store(path).upload(source, self.check)

    def rename(self, source: str, path: str) -> None:
        """Gives a local file its final name."""
        self.check()
        self._written[path] = str(os.stat(source).st_ino)
        os.replace(source, local_path(path))

    def remove(self, path: str) -> None:
        """Deletes a file if it exists."""
        before = Store(path).current() if is_on_gcs(path) else ""
        self.check()
        with contextlib.suppress(FileNotFoundError):
            if before:
                Store(path).remove(before)
            elif not is_on_gcs(path):
                _remove(path)

    def take_back(self) -> None:
        """Deletes the files that were written, unless others have replaced them."""
        for path, identity in self._written.items():
            with contextlib.suppress(FileNotFoundError):
                if is_on_gcs(path):
                    if identity:  # else another writer's
                        Store(path).remove(identity)
                elif is_remote(path) or str(os.stat(local_path(path)).st_ino) == identity:
                    _remove(path)  # other stores have no generations
        self._written.clear()


def _remove(path: str) -> None:
    if is_remote(path):
        Store(path).ask(lambda fs, inside: fs.rm_file(inside))
    else:
        os.unlink(local_path(path))
