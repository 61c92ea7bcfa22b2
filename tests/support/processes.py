"""Commands and programs in processes of their own."""

import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]


def completed(command: Sequence[object], **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command from the root of the project, for 10 minutes at most."""
    how = {"cwd": ROOT, "timeout": 600} | how
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **how)


def started(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """Runs Python with these arguments, as `started("-m", "pipeline.build", …)`."""
    return completed([sys.executable, *arguments], **how)
