"""All supervised tasks by name."""

from collections.abc import Mapping
from types import MappingProxyType

from tasks.annexes.t5_tasks import generation, glue, superglue
from tasks.annexes.t5_tasks.template import Supervised
from tasks.terminal.command_line import UserError, nearest

TASKS: Mapping[str, Supervised] = MappingProxyType(
    {task.name: task for family in (glue, superglue, generation) for task in family.TASKS}
)


def get(name: str) -> Supervised:
    """Returns the supervised task `name`; raises UserError if there is none."""
    if name not in TASKS:
        raise UserError(
            f"unknown supervised task {name}{nearest(name, TASKS)}; known: {', '.join(TASKS)}"
        )
    return TASKS[name]
