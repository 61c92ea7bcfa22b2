"""The error of a damaged checkpoint, which processes tell one another."""

from tasks.terminal.command_line import UserError


class Damaged(UserError):
    """A checkpoint cannot be read, or is not what was written.

    Attributes:
      path: the checkpoint's folder.
      reason: the array or the file that is damaged, and how.
    """

    def __init__(self, path: str, reason: str):
        super().__init__(f"checkpoint {path} is damaged ({reason}): use another one, or a copy")
        self.path, self.reason = path, reason
