"""The first documents of a recipe's corpora, written once as JSON lines for its rehearsal."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from tasks.reading import languages, sources
from tasks.terminal.command_line import UserError
from tasks.unit import Unit

DOCUMENTS = 400
# Of each of many languages, which have caches of their own.
_LEAST = 100
# A book becomes as many windows as hundreds of pages, and is evaluated as long.
_CHARACTERS = 5000
_OPTIONS = "?validation=0.1&id=id"
_OF_PAIRS = "&inputs=inputs&targets=targets"


class Samples:
    """The samples of corpora, below a folder."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self._known: dict[str, str] = {}

    def of(self, where: str, texts: Any, names: Any) -> dict[str, Any]:
        """Returns the key corpus of a table with samples in the place of its corpora."""
        given = [texts] if isinstance(texts, str) else list(texts)
        try:
            joined = ",".join(names) if isinstance(names, list) else names
            specs = languages.specs(given, joined)
            number = max(DOCUMENTS // len(specs), _LEAST)
            found = {name: self._sample(spec, number) for name, spec in specs.items()}
        except UserError as error:
            raise UserError(f"[{where}] {error}") from error
        if list(found) == [""]:
            return {"corpus": found[""]}
        return {"corpus": [f"{name}={spec}" for name, spec in found.items()]}

    def _sample(self, spec: Any, number: int) -> str:
        if str(spec) not in self._known:
            path = self._folder / f"sample-{len(self._known)}.jsonl"
            columns = spec.unit.columns
            pairs = spec.unit is Unit.PAIR
            with path.open("w", encoding="utf-8") as file:
                for row in _rows(spec, number):
                    kept = {name: row[name] for name in ("id", *columns)}
                    if not pairs:
                        kept |= {name: kept[name][:_CHARACTERS] for name in columns}
                    file.write(json.dumps(kept, ensure_ascii=False) + "\n")
            self._known[str(spec)] = f"json:{path}{_OPTIONS}{_OF_PAIRS * pairs}"
        return self._known[str(spec)]


def _rows(spec: Any, number: int) -> Iterator[dict[str, Any]]:
    """Yields the first usable documents of a corpus; raises UserError if there is none."""
    left, problems = number, set[str]()
    corpus = sources.resolve(spec)
    for piece in corpus.pieces:
        for _, batch in sources.read(corpus, piece):
            for row in batch.to_pylist():
                if row["problem"]:
                    problems.add(row["problem"])
                    continue
                yield row
                left -= 1
                if not left:
                    return
    if left == number:
        why = f": {', '.join(sorted(problems))}" if problems else ""
        raise UserError(f"--corpus={spec} has no usable document{why}")
