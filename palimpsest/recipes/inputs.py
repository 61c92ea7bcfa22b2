"""The files of the corpora that a stage reads, by which a later run notices an edit.

A data set of the Hub is not looked at again: the caches pin its revision.
"""

from collections.abc import Iterator
from typing import Any

from palimpsest.recipes.recipe import Stage
from tasks.reading import languages, listers
from tasks.reading.corpus import HUB, PYTHON_DOCS, SourceFile
from tasks.reading.spec import parse
from tasks.storage import files
from tasks.terminal.command_line import UserError

# SPEC -> name of a file -> its bytes, what tells that it was written and, if local, its checksum.
Inputs = dict[str, dict[str, dict[str, Any]]]


def read(stage: Stage) -> Inputs:
    """Returns the files that a stage is about to read; local ones are read for their checksums."""
    return {
        text: {name: _state(file) | _checksum(file) for name, file in listed.items()}
        for text, listed in _listed(stage)
    }


def edited(stage: Stage, before: Inputs) -> str:
    """Returns what has changed in the corpora of a stage, or "".

    A corpus that is no longer there counts as unchanged: it may have been deleted after use.
    """
    for text, listed in _listed(stage) if before else ():
        if not listed or text not in before:
            continue
        if different := sorted(before[text].keys() ^ listed.keys()):
            return f"{text}: {different[0]} is {'new' if different[0] in listed else 'gone'}"
        for name, file in listed.items():
            old = before[text][name]
            if not old.items() >= _state(file).items() and not _is_same(file, old):
                return f"{text}: {name} was edited"
    return ""


def _is_same(file: SourceFile, old: dict[str, Any]) -> bool:
    """Returns whether a file that was written again has the same bytes."""
    return file.bytes == old["bytes"] and "sha256" in old and _checksum(file).items() <= old.items()


def _listed(stage: Stage) -> Iterator[tuple[str, dict[str, SourceFile]]]:
    specs = [parse(text) for text in stage.flags.get("against", ())]
    if texts := stage.flags.get("corpus"):
        names = stage.flags.get("languages", (None,))[0]
        specs += languages.specs(texts, names, unnamed=True).values()
    for spec in specs:
        lister = listers.of_kind(spec.kind)
        if spec.kind in (HUB, PYTHON_DOCS) or not isinstance(lister, listers.Files):
            continue
        try:
            *_, found, _ = lister.list_files(spec, bool(spec.split))
        except (UserError, FileNotFoundError):
            found = []  # the command says what is wrong
        yield str(spec), {file.name: file for file in found}


def _state(file: SourceFile) -> dict[str, Any]:
    return {"bytes": file.bytes, "state": file.written or file.etag}


def _checksum(file: SourceFile) -> dict[str, str]:
    return {} if file.is_remote else {"sha256": files.sha256(file.path)}
