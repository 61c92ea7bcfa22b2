"""The files of a corpus, as a list of duplicates that was made from it names them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from tasks.reading.sources import Corpus
from tasks.storage import files

State = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a corpus; its `name` begins below `folder`, "" if unknown.

    `member` is the end of its name, "::a.txt", if it is in an archive; size and state are of that.
    """

    folder: str
    name: str
    bytes: int
    state: State  # its checksum
    member: str = ""

    @property
    def path(self) -> str:
        return self.folder + self.name

    @property
    def archive(self) -> str:
        """The name without the member."""
        return self.name.removesuffix(self.member)

    def within(self, name: str) -> "File":
        """Returns the member of this archive that has this name."""
        return dataclasses.replace(self, name=name, member=name.removeprefix(self.name))


@dataclasses.dataclass(frozen=True)
class Origin:
    """A corpus, as a list or a cache records it."""

    corpus: str  # its SPEC
    files: tuple[File, ...]

    def as_json(self) -> dict[str, Any]:
        folder = self.files[0].folder if self.files else ""
        entries = [
            [file.name, file.bytes, dict(file.state), *filter(None, [file.member])]
            for file in self.files
        ]
        return {"corpus": self.corpus, "folder": folder, "files": entries}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Origin":
        found = (
            File(value["folder"], name, size, _state(state), *member)
            for name, size, state, *member in value["files"]
        )
        return cls(value["corpus"], tuple(found))


def _state(value: Mapping[str, Any]) -> State:
    return tuple(sorted(value.items()))


def of_corpus(corpus: Corpus) -> Origin:
    parts = next((piece.parts for piece in corpus.pieces if piece.parts), ())
    folder = parts[0].file.folder if parts else ""
    if folder and not files.is_remote(folder):
        folder = os.path.join(os.path.abspath(files.local_path(folder)), "")
    return of_record(corpus.record, folder, str(corpus.spec))


def of_record(record: Mapping[str, Any], folder: str = "", spec: str = "") -> Origin:
    """Returns a corpus from the record in its cache's plan."""
    names = ("name", "bytes", "split")
    found = tuple(
        File(folder, each["name"], each["bytes"], _state(
            {key: value for key, value in each.items() if key not in names}))
        for each in record.get("files", ())
    )  # fmt: skip
    if not found:  # the built-in corpus is one file
        found = (File("", "", 0, _state({"sha256": str(record.get("sha256", ""))})),)
    return Origin(spec or record.get("spec", ""), found)
