"""The list of a multilingual task's languages, each of which has its own cache.

`pipeline.build --name=NAME --task=OBJECTIVE` with languages A and B writes the caches
NAME_A_OBJECTIVE and NAME_B_OBJECTIVE, then NAME_OBJECTIVE/languages.json.
"""

from collections.abc import Collection, Sequence

from tasks.cache.manifest import LANGUAGES, MANIFEST
from tasks.storage import files
from tasks.task import objective_of
from tasks.terminal.command_line import UserError

_FORMAT = 1


def cache_of(task: str, language: str) -> str:
    """Returns the name of the task, and cache, of one language of `task`."""
    objective = objective_of(task) or ""
    return f"{task.removesuffix(objective)}{language}_{objective}"


def languages(cache_dir: str, task: str) -> list[str]:
    """Returns the languages of `task`, or []; raises UserError if the list is damaged."""
    path = files.join(cache_dir, task, LANGUAGES)
    if not files.exists(path):
        return []
    value = files.read_json(path)
    found = value.get("languages") if isinstance(value, dict) else None
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise UserError(f"{path} is damaged: delete it, and run pipeline.build again")
    return found


def write(cache_dir: str, task: str, found: Sequence[str]) -> None:
    """Writes the languages of `task`, whose caches are all finished."""
    value = {"format": _FORMAT, "task": task, "languages": list(found)}
    files.make_folder(files.join(cache_dir, task))
    files.write_json(files.join(cache_dir, task, LANGUAGES), value)


def tasks_of(cache_dir: str, task: str, relatives: Collection[str]) -> list[str]:
    """Returns the tasks of the languages of `task`; [] if it has a cache itself.

    If it has no languages, uses the languages of the only task in `relatives` (on the same corpus)
    that has some, because a cache serves any objective; [] if there is no such task.
    """
    if any(files.exists(files.join(cache_dir, *of, MANIFEST)) for of in ((), (task,))):
        return []
    found = languages(cache_dir, task)
    if not found:
        names = [name for name in files.list_names(cache_dir) if name in relatives]
        others = [known for name in names if (known := languages(cache_dir, name))]
        found = others[0] if len(others) == 1 else []
    return [cache_of(task, language) for language in found]
