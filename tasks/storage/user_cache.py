"""The user's cache folder, and the limit on what we keep there."""

import os
import pathlib


def folder(*names: str) -> pathlib.Path:
    """Returns a folder within the user's cache.

    Source: the XDG Base Directory Specification, which has relative paths ignored.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(home, "palimpsest", *names)


def remove_oldest(within: pathlib.Path, pattern: str, most: int) -> None:
    """Removes the files below a folder that were used longest ago until `most` bytes are left."""
    try:
        found = [(path, path.stat()) for path in within.rglob(pattern)]
        # Most systems note when a file is read, once a day; others when it was written.
        found.sort(key=lambda each: -max(each[1].st_atime, each[1].st_mtime))
        size = 0
        for path, facts in found:
            size += facts.st_size
            if size > most:
                path.unlink(missing_ok=True)
    except OSError:
        return  # another process removed a file, or the folder is read-only
