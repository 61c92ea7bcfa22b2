"""The files that a stage reads and no stage makes, by which a later run notices an edit.

They are the files of its corpora, and of vocabularies, exclude lists and folders of transformers.
A data set of the Hub is not looked at again: the caches pin its revision.
"""

from collections.abc import Iterator
from typing import Any

from palimpsest.annexes.recipes.recipe import Recipe, Stage
from tasks.reading import languages, listers
from tasks.reading.corpus import HUB, PYTHON_DOCS, CorpusSpec, SourceFile
from tasks.reading.spec import parse
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.vocabulary import VOCABULARY_FILES

# Flags -> what the path follows, and which files are read if it is a folder.
_OF_VOCABULARY = f"/{{{','.join(VOCABULARY_FILES)}}}"
_OTHERS = {
    "vocabulary": ("", _OF_VOCABULARY),
    "extend": ("", _OF_VOCABULARY),
    "exclude": ("", ""),
    "init_from": ("hf:", "/*"),
}
# SPEC, or flag and text -> name of a file -> its bytes, what tells that it was written and, if
# local, its checksum.
Inputs = dict[str, dict[str, dict[str, Any]]]


def read(recipe: Recipe, stage: Stage) -> Inputs:
    """Returns the files that a stage is about to read; local ones are read for their checksums."""
    return {
        text: {name: _state(file) | _checksum(file) for name, file in listed.items()}
        for text, listed in _listed(recipe, stage)
    }


def edited(recipe: Recipe, stage: Stage, before: Inputs) -> str:
    """Returns what has changed in the files that a stage reads, or "".

    What is no longer there counts as unchanged: it may have been deleted after use.
    """
    for text, listed in _listed(recipe, stage) if before else ():
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
    return (
        file.bytes == old.get("bytes")
        and "sha256" in old
        and _checksum(file).items() <= old.items()
    )


def _listed(recipe: Recipe, stage: Stage) -> Iterator[tuple[str, dict[str, SourceFile]]]:
    specs = [parse(text) for text in stage.flags.get("against", ())]
    if texts := stage.flags.get("corpus"):
        names = stage.flags.get("languages", (None,))[0]
        specs += languages.specs(texts, names, unnamed=True).values()
    for spec in specs:
        lister = listers.of_kind(spec.kind)
        if spec.kind not in (HUB, PYTHON_DOCS) and isinstance(lister, listers.Files):
            yield str(spec), _files(lister, spec)
    made = [each.output for each in recipe.stages if each.name in stage.needs]
    for flag, (prefix, inner) in _OTHERS.items():
        for text in stage.flags.get(flag, ("",))[0].split(","):
            place = text.removeprefix(prefix)
            is_made = any(f"{place}/".startswith(f"{each}/") for each in made)
            if place and text.startswith(prefix) and not is_made:
                is_file = files.exists(place) and not files.list_names(place)
                spec = CorpusSpec("text", place if is_file else place + inner)
                yield f"{flag}={text}", _files(listers.Files(), spec)


def _files(lister: listers.Files, spec: CorpusSpec) -> dict[str, SourceFile]:
    try:
        found = lister.list_files(spec, bool(spec.split))[2]
    except (UserError, FileNotFoundError):
        found = []  # the command says what is wrong
    return {file.name: file for file in found}


def _state(file: SourceFile) -> dict[str, Any]:
    return {"bytes": file.bytes, "state": file.written or file.etag}


def _checksum(file: SourceFile) -> dict[str, str]:
    return {} if file.is_remote else {"sha256": files.sha256(file.path)}
