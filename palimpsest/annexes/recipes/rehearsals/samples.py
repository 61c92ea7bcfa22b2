"""The first documents of a recipe's corpora, written once as JSON lines for its rehearsal."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from tasks.document_kind import DocumentKind
from tasks.reading import languages, sources
from tasks.reading.corpus import VALIDATION, Corpus
from tasks.terminal.command_line import UserError
from tasks.terminal.toml_flags import as_text

DOCUMENTS = 400
# Of each of many languages, which have caches of their own.
_LEAST = 100
# More of short ones, until they fill so many windows.
_WINDOWS, _MOST = 60, 20_000
# A book becomes as many windows as hundreds of pages, and is evaluated as long.
_CHARACTERS = 5000
_SHARE = 0.1
_OF_PAIRS = "&inputs=inputs&targets=targets"


class Samples:
    """The samples of corpora, below a folder, for runs with windows of so many tokens."""

    def __init__(self, folder: pathlib.Path, window: int):
        self._folder, self._characters = folder, _WINDOWS * window
        self._known: dict[str, str] = {}
        self._whole: list[str] = []  # those that leave nothing out

    def of(self, where: str, texts: Any, names: Any) -> dict[str, Any]:
        """Returns the key corpus of a table with samples in the place of its corpora."""
        given = [as_text(each) for each in (texts if isinstance(texts, list) else [texts])]
        try:
            joined = None if names is None else as_text(names)
            specs = languages.specs(given, joined)
            number = max(DOCUMENTS // len(specs), _LEAST)
            found = {name: self._sample(spec, number) for name, spec in specs.items()}
        except UserError as error:
            raise UserError(f"[{where}] {error}") from error
        if list(found) == [""]:
            return {"corpus": found[""]}
        return {"corpus": [f"{name}={spec}" for name, spec in found.items()]}

    def are_whole(self, texts: Any) -> bool:
        """Returns whether samples, as in the key corpus, are their whole corpora."""
        given = [texts] if isinstance(texts, str) else texts
        return all(any(each.endswith(whole) for whole in self._whole) for each in given)

    def _sample(self, spec: Any, number: int) -> str:
        if str(spec) not in self._known:
            corpus = sources.resolve(spec)
            documents = characters = held_out = passed_over = 0
            rest = cut = False
            # With less, the sample holds out others of its documents.
            wanted = number // 10 if spec.validation >= _SHARE else 0
            path = self._folder / f"sample-{len(self._known)}.jsonl"
            columns = spec.unit.columns
            pairs = spec.unit is DocumentKind.PAIR
            with path.open("w", encoding="utf-8") as file:
                for split, row in _rows(corpus):
                    enough = documents >= number and (pairs or characters >= self._characters)
                    if enough or documents >= _MOST:
                        rest = True
                        # A batch's documents that are held out come after all of its others.
                        if held_out >= wanted or passed_over == _MOST:
                            break
                        if split != VALIDATION:
                            passed_over += 1
                            continue
                    held_out += split == VALIDATION
                    kept = {name: row[name] for name in ("id", *columns)}
                    if not pairs:
                        cut |= any(len(kept[name]) > _CHARACTERS for name in columns)
                        kept |= {name: kept[name][:_CHARACTERS] for name in columns}
                    documents += 1
                    characters += sum(len(kept[name]) for name in columns)
                    file.write(json.dumps(kept, ensure_ascii=False) + "\n")
            share = _share(corpus, whole=not rest)
            found = f"json:{path}?validation={share}&id=id{_OF_PAIRS * pairs}"
            self._known[str(spec)] = found
            if not rest and not cut:
                self._whole.append(found)
        return self._known[str(spec)]


def _share(corpus: Corpus, whole: bool) -> float:
    """Returns the share of documents to hold out: the corpus's own if that shows what it does."""
    if any(piece.splits == (VALIDATION,) for piece in corpus.pieces):
        return _SHARE  # it has files for that
    own: float = corpus.spec.validation
    return own if whole or not own else max(own, _SHARE)


def _rows(corpus: Corpus) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the splits and usable documents of a corpus; raises UserError if there is none."""
    found, problems = False, set[str]()
    for piece in corpus.pieces:
        for split, batch in sources.read(corpus, piece):
            for row in batch.to_pylist():
                if row["problem"]:
                    problems.add(row["problem"])
                    continue
                found = True
                yield split, row
    if not found:
        why = f": {', '.join(sorted(problems))}" if problems else ""
        raise UserError(f"--corpus={corpus.spec} has no usable document{why}")
