"""Sets of questions by name: the ones that come with the package, files, folders, and corpora."""

import pathlib
from collections.abc import Sequence
from typing import Any

from tasks.questions import question
from tasks.questions.question import Question
from tasks.storage import files
from tasks.terminal.command_line import UserError

_OWN = pathlib.Path(__file__).parent / "files"
_LINES = ".jsonl"
_FORMS = "a suite ({names}), a FILE.jsonl, a folder of them, or a SPEC of a corpus"


def names() -> list[str]:
    """Returns the names of the suites that come with the package."""
    return sorted(each.name for each in _OWN.iterdir() if each.is_dir())


def load(suites: Sequence[str], limit: int | None = None) -> dict[str, list[Question]]:
    """Returns the sets of questions by name, at most `limit` of each, evenly spread.

    A suite is one of `names()`, a folder, or a file: a set is SUITE.FILE or FILE. A SPEC of a
    corpus, such as hf:OWNER/NAME, is a set of texts or, with ?inputs=…&targets=…, of pairs of a
    right and a wrong sentence. Raises UserError if there is no such suite or it has no questions.
    """
    found: dict[str, list[Question]] = {}
    for suite in suites:
        for name, questions in _sets(suite, limit):
            if name in found:
                raise UserError(f"--suite: two sets are called {name}: rename a file")
            found[name] = _spread(questions, limit)
    return found


def _spread(questions: list[Question], limit: int | None) -> list[Question]:
    """Returns at most `limit` questions from all over the list: groups follow each other."""
    count = len(questions)
    if limit is None or limit >= count:
        return questions
    return [questions[number * count // limit] for number in range(limit)]


def _sets(suite: str, limit: int | None) -> list[tuple[str, list[Question]]]:
    flag = f"--suite={suite}"
    own = _OWN / suite
    folder = str(own) if suite in names() else suite.rstrip("/")
    if suite.endswith(_LINES):
        return [(pathlib.PurePath(suite).stem, question.read(suite, flag))]
    is_spec = suite == "python_docs" or (":" in suite and "://" not in suite)
    listed = [] if is_spec else sorted(files.list_names(folder))
    if paths := [each for each in listed if each.endswith(_LINES)]:
        prefix = pathlib.PurePath(folder).name
        return [
            (
                f"{prefix}.{path[: -len(_LINES)]}",
                question.read(f"{folder}/{path}", f"{flag}/{path}"),
            )
            for path in paths
        ]
    if not is_spec:
        raise UserError(f"{flag}: no such suite; give {_FORMS.format(names=', '.join(names()))}")
    return [(_name(suite), of_corpus(suite, limit))]


def _name(spec: str) -> str:
    """Returns a SPEC's name: what follows the kind, without options and path."""
    return pathlib.PurePath(spec.partition("?")[0].partition(":")[2] or spec).name.partition(".")[0]


def of_corpus(spec: str, limit: int | None = None) -> list[Question]:
    """Returns the pairs or texts of a corpus, in its order, as questions."""
    found = [_of_row(row) for row in rows(spec, limit)]
    if not found:
        raise UserError(f"--suite={spec} has no text")
    return found


def rows(spec: str, limit: int | None = None) -> list[dict[str, Any]]:
    """Returns the usable documents of a corpus, of all splits, with the columns of its batches."""
    from tasks.reading import sources

    corpus = sources.resolve(sources.parse(spec))
    found: list[dict[str, Any]] = []
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            found += [row for row in batch.to_pylist() if not row["problem"] and _filled(row)]
            if limit is not None and len(found) >= limit:
                return found[:limit]
    return found


def _filled(row: dict[str, Any]) -> bool:
    texts = [row[name] for name in ("text", "inputs", "targets") if name in row]
    return all(text and text.strip() for text in texts)


def _of_row(row: dict[str, Any]) -> Question:
    if "inputs" in row:
        return question.of_pair(row["inputs"], row["targets"])
    return question.of_text(row["text"])
