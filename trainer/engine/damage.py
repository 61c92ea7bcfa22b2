"""The error of a damaged checkpoint, shared between processes."""

from tasks.terminal.command_line import UserError


class Damaged(UserError):
    """A checkpoint in folder `path` is unreadable or altered; `reason` says where and how."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"checkpoint {path} is damaged ({reason}): use another one, or a copy")
        self.path, self.reason = path, reason
