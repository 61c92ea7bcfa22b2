"""Finds tasks and mixtures by name, in milliseconds, without heavy imports.

`module` is a user's module; every function raises UserError if it cannot be imported.
"""

import contextlib
import importlib.util
import os
import sys
import traceback
import types
from collections.abc import Sequence
from typing import TypeVar

import palimpsest_home
from tasks import annexes
from tasks.corpora import c4, lm1b, pg19, python_docs, rlm, wikipedia
from tasks.mixture import MixtureSpec
from tasks.task import OBJECTIVES, TaskSpec, objective_of, own_task
from tasks.terminal import extras
from tasks.terminal.command_line import UserError, nearest

# A task on a user's corpus, for messages.
OWN_EXAMPLE = "mine_span_corruption"

_Kind = TypeVar("_Kind")
# Packages that modules of T5 and T5X projects import, called the same on the package index.
_INSTALLABLE = ("t5", "seqio", "tensorflow_datasets", "tensorflow_text")
_OURS = [task for family in (rlm, c4, lm1b, pg19, wikipedia, python_docs) for task in family.TASKS]
annexes.reserve("tasks", (task.name for task in _OURS))


def tasks(module: str | None = None) -> dict[str, TaskSpec]:
    """Returns all tasks by name, including those of annexes and TASKS of a user's `module`."""
    return {
        **annexes.loaded("tasks"),
        **_named(module),
    }


def _named(module: str | None) -> dict[str, TaskSpec]:
    """Returns the core's tasks and those of a user's module by name."""
    return {task.name: task for task in [*_OURS, *_own(module, "TASKS", TaskSpec)]}


def mixtures(module: str | None = None) -> dict[str, MixtureSpec]:
    """Returns the mixtures of a user's module (its tuple MIXTURES) by name."""
    return {mixture.name: mixture for mixture in _own(module, "MIXTURES", MixtureSpec)}


def _own(module: str | None, name: str, kind: type[_Kind]) -> Sequence[_Kind]:
    found = getattr(load(module), name, ()) if module else ()
    if not (isinstance(found, list | tuple) and all(isinstance(each, kind) for each in found)):
        raise UserError(f"--task_module={module}: {name} must be a tuple of {kind.__name__}")
    return found


def names(module: str | None = None) -> set[str]:
    """Returns the names of all tasks and mixtures."""
    return {*tasks(module), *mixtures(module)}


def load(module: str) -> types.ModuleType:
    """Imports a user's module: by name, from the working directory or the path, or a .py file.

    A file may have the name of one of our packages, such as the `tasks.py` of a T5X project, or of
    any library.
    """
    file = _file_of(module)
    name = palimpsest_home.importable(file) if file else module
    extras.prepare_tensorflow()  # a seqio Task's module imports it
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except ImportError as error:
        name = (error.name or "").partition(".")[0]
        advice = f": pip install {name}" if name in _INSTALLABLE else ""
        raise UserError(f"--task_module={module} cannot be imported: {error}{advice}") from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"--task_module={module} cannot be imported: {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno})"
        ) from error
    finally:
        sys.path.remove(here)  # also if the module has changed the directory


def _file_of(module: str) -> str | None:
    """Returns the file that a value of --task_module names, or None if it is a module's name."""
    if not module or (module.startswith(".") and not module.endswith(".py")):
        raise UserError(
            f"--task_module={module}: pass the name of a Python module, or its file, such as "
            "./mine.py"
        )
    found: list[str] = []
    if module.endswith(".py"):
        found = [module]
    elif module.partition(".")[0] in palimpsest_home.PACKAGES:
        path = module.replace(".", "/")
        found = [f"{path}.py", f"{path}/__init__.py"]
        with contextlib.suppress(ModuleNotFoundError):  # of a parent that is not ours
            if "." in module and importlib.util.find_spec(module):
                return None  # one of ours
    if file := next(filter(os.path.isfile, found), None):
        return file
    if found:
        raise UserError(f"--task_module={module}: there is no file {' or '.join(found)}")
    return None


def find(name: str, module: str | None = None) -> TaskSpec | None:
    """Returns the task `name`, registered or NAME_OBJECTIVE; None if there is none."""
    # Of the annexes, only the one with the name is imported.
    return _named(module).get(name) or annexes.get("tasks", name) or own_task(name)


def get(name: str, module: str | None = None) -> TaskSpec:
    """Returns the task `name`, registered or NAME_OBJECTIVE; raises UserError if there is none."""
    found = find(name, module)
    if found is None:
        if name.startswith("seqio:"):
            raise UserError(
                f"--task={name}: trainer.pretrain trains on seqio's tasks as they are; for a "
                "cache, run seqio_cache_tasks, then adopt its folder (docs/adopting.md)"
            )
        known, family = tasks(module), name.partition("_")[0] + "_"
        names = ", ".join(each for each in known if each.startswith(family))
        raise UserError(
            f"unknown task {name}{nearest(name, [*known, *OBJECTIVES])}; "
            f"{f'known: {names}; ' if names else ''}a "
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
