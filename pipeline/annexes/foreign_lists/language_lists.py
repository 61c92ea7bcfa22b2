"""The exclude lists of a task of several languages, kept beside the list of its languages.

    lists.json                for each list: its copies for the languages, and for those to come
    exclude-SHA256.arrow      the copies

They are written before the first language is built, so that a language that is built later, after
an interruption or by --extend, is built with them as well.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.annexes.foreign_lists import translation
from pipeline.building import lifecycle
from pipeline.exclusion import lists
from pipeline.exclusion.lists import OF_LANGUAGES, Given
from pipeline.exclusion.targets import Target
from tasks.cache import language_set
from tasks.storage import files
from tasks.terminal.command_line import UserError

_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Lists:
    """The lists of a build of several languages: given to it, or in force already."""

    folder: str
    of_languages: dict[str, list[Given]]  # all lists of each language
    others: dict[str, Given | None]  # by SHA-256 of the list as given: that for other languages

    @property
    def some(self) -> bool:
        """True if a language has a list."""
        return any(self.of_languages.values())

    def keep(self) -> None:
        """Writes the lists in the task's folder, for languages that are built later.

        The folder must be locked.
        """
        kept = {each["list"]: each for each in _entries(self.folder)}
        for language, of_language in self.of_languages.items():
            for each in of_language:
                new = {"list": each.original, "others": "", "languages": {}}
                if other := self.others.get(each.original):
                    new["others"] = self._copied(other)
                entry = kept.setdefault(each.original, new)
                entry["languages"].setdefault(language, self._copied(each))
        # Sorted, so that the file does not depend on which language or list came first.
        value = {"format": _FORMAT, "lists": [kept[each] for each in sorted(kept)]}
        files.write_json(files.join(self.folder, OF_LANGUAGES), value)

    def _copied(self, each: Given) -> str:
        name = lists.copy_name(each.record.sha256)
        files.copy(each.path, files.join(self.folder, name))
        return name


def of_build(
    cache_dir: str,
    task: str,
    targets: Mapping[str, Target],
    given: Sequence[Given],
    scratch: str,
) -> Lists:
    """Returns the lists of each language that is built now."""
    folder = files.join(cache_dir, task)
    found = translation.translated(given, targets, scratch)
    originals = {each.original for each in given}
    of_languages = {}
    for language, target in targets.items():
        before = []
        for each in _in_force(cache_dir, task, language, scratch):
            if each.original not in originals:
                before += translation.translated([each], {language: target}, scratch)[language]
        of_languages[language] = before + found[language]
    others = {each.original: translation.others(each, targets, scratch) for each in given}
    return Lists(folder, of_languages, others)


def _in_force(cache_dir: str, task: str, language: str, scratch: str) -> list[Given]:
    folder = files.join(cache_dir, task)
    entries = _entries(folder)
    if not entries:
        return _of_sibling(cache_dir, task, language, scratch)
    names = (entry["languages"].get(language, entry["others"]) for entry in entries)
    paths = [files.join(folder, name) for name in names if name]
    return [dataclasses.replace(lists.given_at(path, scratch), again=True) for path in paths]


def _of_sibling(cache_dir: str, task: str, language: str, scratch: str) -> list[Given]:
    """Returns the lists of ids of a task that version 0.2.0 built, for a further language."""
    known = language_set.languages(cache_dir, task)
    if not known or language in known:
        return []
    folder = files.join(cache_dir, language_set.cache_of(task, known[0]))
    plan = lifecycle.planned(folder)
    found = []
    for record in (plan.exclude if plan else None) or ():
        path = files.join(folder, lists.copy_name(record.sha256))
        if record.kind == lists.IDS:
            found.append(dataclasses.replace(lists.given_at(path, scratch), again=True))
        else:
            note = f"language {language}: {path} has no documents of it, and is not in force for it"
            print(note, file=sys.stderr)
    return found


def _entries(folder: str) -> list[dict[str, Any]]:
    path = files.join(folder, OF_LANGUAGES)
    try:
        return files.read_json(path)["lists"]
    except FileNotFoundError:
        return []
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: restore it from a copy") from error
