"""Finds tasks and mixtures by name, in milliseconds, without heavy imports.

`module` is a user's module; every function raises UserError if it cannot be imported.
"""

import importlib
import os
import sys
import types

import palimpsest_home
from tasks.corpora import c4, lm1b, pg19, python_docs, rlm, wikipedia
from tasks.mixture import MixtureSpec
from tasks.task import OBJECTIVES, TaskSpec, objective_of, own_task
from tasks.terminal.command_line import UserError, nearest

# A task on a user's corpus, for messages.
OWN_EXAMPLE = "mine_span_corruption"

_FAMILIES = (rlm, c4, lm1b, pg19, wikipedia, python_docs)


def tasks(module: str | None = None) -> dict[str, TaskSpec]:
    """Returns all known tasks by name, including TASKS of a user's `module`."""
    own = getattr(load(module), "TASKS", ()) if module else ()
    ours = [task for family in _FAMILIES for task in family.TASKS]
    return {task.name: task for task in [*ours, *own]}


def mixtures(module: str | None = None) -> dict[str, MixtureSpec]:
    """Returns the mixtures of a user's module (its tuple MIXTURES) by name."""
    found = getattr(load(module), "MIXTURES", ()) if module else ()
    return {mixture.name: mixture for mixture in found}


def names(module: str | None = None) -> set[str]:
    """Returns the names of all tasks and mixtures."""
    return {*tasks(module), *mixtures(module)}


def load(module: str) -> types.ModuleType:
    """Imports a user's module: by name, from the working directory or the path, or a .py file.

    A file may have the name of one of our packages, such as the `tasks.py` of a T5X project.
    """
    if not module:
        raise UserError("--task_module is empty: pass the name of a Python module, or its file")
    name = module
    file = f"{module}.py" if module in palimpsest_home.PACKAGES else module
    if file.endswith(".py"):
        if not os.path.isfile(file):
            raise UserError(f"--task_module={module}: there is no file {file}")
        name = palimpsest_home.importable(file)
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"--task_module={module} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)  # also if the module has changed the directory


def find(name: str, module: str | None = None) -> TaskSpec | None:
    """Returns the task `name`, registered or NAME_OBJECTIVE; None if there is none."""
    return tasks(module).get(name) or own_task(name)


def get(name: str, module: str | None = None) -> TaskSpec:
    """Returns the task `name`, registered or NAME_OBJECTIVE; raises UserError if there is none."""
    found = find(name, module)
    if found is None:
        known, family = tasks(module), name.partition("_")[0] + "_"
        names = ", ".join(each for each in known if each.startswith(family))
        raise UserError(
            f"unknown task {name}{nearest(name, known)}; {f'known: {names}; ' if names else ''}a "
            f"task on your own corpus is called NAME_OBJECTIVE, such as {OWN_EXAMPLE}, with one of "
            f"the objectives {', '.join(OBJECTIVES)}"
        )
    return found


def relatives(task: TaskSpec, module: str | None = None) -> set[str]:
    """Returns the names of the tasks on the same corpus, whose caches also serve this task."""
    if task.corpus:
        return {other.name for other in tasks(module).values() if other.corpus == task.corpus}
    family = task.name.removesuffix(str(objective_of(task.name)))
    return {f"{family}{objective}" for objective in OBJECTIVES if family}
