"""Checks that a folder can be written, before hours are spent on what goes there."""

import contextlib
import os
import uuid

from tasks.storage import files
from tasks.terminal.command_line import UserError


def check(folder: str, advice: str) -> None:
    """Raises UserError if no file can be written in a folder, which need not exist.

    `advice` is the end of the message.
    """
    path = files.join(folder, f".check-{uuid.uuid4().hex}")
    made: list[str] = []  # the folders that this makes, the innermost first
    inner = "" if files.is_remote(folder) else os.path.abspath(files.local_path(folder))
    while inner and not os.path.exists(inner):
        made.append(inner)
        inner = os.path.dirname(inner)
    try:
        files.make_folder(folder)
        files.write_bytes(path, b"")
        files.remove(path)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror or error}): {advice}"
        ) from error
    for each in made:
        with contextlib.suppress(OSError):
            os.rmdir(each)
