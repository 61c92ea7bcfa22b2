"""Python modules in process groups of their own, to be killed with all that they started."""

import pathlib
import sys

from tasks.terminal.process_group import ProcessGroup


class ModuleGroup(ProcessGroup):
    """A Python module in a process group of its own; `module` is what follows `python -m`."""

    def __init__(self, module: list[str], log: pathlib.Path, **options):
        super().__init__([sys.executable, "-m", *module], log, **options)

    @property
    def pid(self) -> int:
        """Id of the process and of its group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True until the process has exited."""
        return self.exit_code is None

    def log_tail(self, characters: int = 500) -> str:
        """Returns the end of the output as one line."""
        return " ".join(self.output().split())[-characters:]
