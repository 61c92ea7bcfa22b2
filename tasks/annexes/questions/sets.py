"""Sets of questions by name: the ones that come with the package, files, folders, and corpora."""

import itertools
import os
import pathlib
import re
import sys
from typing import Any

from tasks.annexes.questions import question
from tasks.annexes.questions.question import Question
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.texts import listed

_OWN = pathlib.Path(__file__).parent / "files"
_LINES = ".jsonl"
_NAMED = re.compile(r"([\w.-]+)=(.+)")
# The beginning of a corpus, KIND:PLACE, which the scheme of a store is not.
_CORPUS = re.compile(r"[\w.+-]+:(?!//)")
_FORMS = "a suite ({names}), a FILE.jsonl, a folder of them, or a SPEC of a corpus"


def names() -> list[str]:
    """Returns the names of the suites that come with the package."""
    return sorted(path.name for path in _OWN.iterdir() if path.is_dir())


def load(suites: str, limit: int | None = None, flag: str = "--suite") -> dict[str, list[Question]]:
    """Returns the sets of questions by name, at most `limit` of each, evenly spread.

    Suites are separated by commas, or by ; if they contain commas. One is of `names()`, a folder,
    or a file: a set is SUITE.FILE or FILE. A SPEC of a corpus, such as hf:OWNER/NAME, is a set of
    texts or, with ?inputs=…&targets=…, of pairs of a right and a wrong sentence; NAME=SPEC names
    it. Raises UserError if there is no such suite or it has no questions.
    """
    found: dict[str, list[Question]] = {}
    for suite in filter(None, listed(suites)):
        for name, questions in _sets(suite, limit, flag):
            if name in found:
                raise UserError(
                    f"{flag}: two sets are called {name}: rename a file, or write NAME=SPEC"
                )
            found[name] = _spread(questions, limit)
    if not found:
        raise UserError(f"{flag}={suites}: give {_FORMS.format(names=', '.join(names()))}")
    return found


def _spread(questions: list[Question], limit: int | None) -> list[Question]:
    """Returns at most `limit` questions from all over the list: groups follow each other."""
    count = len(questions)
    if limit is None or limit >= count:
        return questions
    return [questions[number * count // limit] for number in range(limit)]


def _sets(suite: str, limit: int | None, flag: str) -> list[tuple[str, list[Question]]]:
    given = f"{flag}={suite}"
    named = _NAMED.match(suite)
    name, spec = (named[1], named[2]) if named and not os.path.exists(suite) else ("", suite)
    place = spec.partition("?")[0]
    if place == "python_docs" or _CORPUS.match(place):
        path = place.partition(":")[2] or place
        return [(name or re.sub(r"\W+", "_", path).strip("_"), of_corpus(spec, limit, flag))]
    if spec.endswith(_LINES):
        return [(name or pathlib.PurePath(spec).stem, question.read(spec, given))]
    folder = str(_OWN / spec) if spec in names() else spec.rstrip("/")
    inside = sorted(files.list_names(folder))
    if not inside:
        raise UserError(f"{given}: no such suite; give {_FORMS.format(names=', '.join(names()))}")
    paths = [each for each in inside if each.endswith(_LINES)]
    if not paths:
        raise UserError(f"{given}: the folder has no {_LINES} file")
    prefix = name or pathlib.PurePath(folder).name
    return [
        (
            f"{prefix}.{path.removesuffix(_LINES)}",
            question.read(f"{folder}/{path}", f"{flag}={folder}/{path}"),
        )
        for path in paths
    ]


def of_corpus(spec: str, limit: int | None = None, flag: str = "--suite") -> list[Question]:
    """Returns the pairs or texts of a corpus, in its order, as questions.

    Pairs of equal sentences are left out, with a note on standard error.
    """
    found: list[Question] = []
    equal = 0
    for row in rows(spec, limit):
        if "inputs" not in row:
            found += question.cut(row["text"])
        elif row["inputs"].split() != row["targets"].split():
            found.append(question.of_pair(row["inputs"], row["targets"]))
        else:
            equal += 1
    if not found:
        why = f"only {equal:,} pairs of equal sentences" if equal else "no text"
        raise UserError(f"{flag}={spec} has {why}")
    if equal:
        print(f"note: {equal:,} pairs of {spec} are left out: equal sentences", file=sys.stderr)
    return found


def rows(spec: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Returns the usable documents of a corpus, of all splits, with the columns of its batches."""
    return [row for _, row in rows_with_splits(spec, limit)]


def rows_with_splits(spec: str, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Returns (split, columns) of each usable document of a corpus."""
    from tasks.reading import sources

    filled = (document for document in sources.documents(spec) if _filled(document[1]))
    return list(itertools.islice(filled, limit))


def _filled(row: dict[str, Any]) -> bool:
    texts = [row[name] for name in ("text", "inputs", "targets") if name in row]
    return all(text and text.strip() for text in texts)
