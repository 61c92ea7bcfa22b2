"""Gathers text installed on this machine into one Parquet file of documents.

    python -m benchmarks.text --output=text.parquet --megabytes=120 [FOLDER ...]
    python -m benchmarks.text --output=asian.parquet --languages=ja,zh_CN,zh_TW,th
    python -m benchmarks.text --output=words.parquet --megabytes=20 --words

Reads programs, documentation, manual pages and translations (.py .js .rst .md .txt .html .mo and
others, also gzipped) from Python's packages and library, /usr/share, and the given folders, such as
unpacked documentation packages in other languages (Debian's manpages-ja, manpages-zh,
libreoffice-help-zh-cn, libreoffice-l10n-ro, -th, -km). With --languages, reads only what lies in
folders of that name, the translations of programs. With --words, writes random words of 3 to 12
letters, nearly all of them new. Duplicates are dropped; files are ordered by the hash of their
path.
"""

import dataclasses
import gettext
import gzip
import hashlib
import html.parser
import io
import pathlib
import random
import string
import sysconfig

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.terminal.command import Command
from tasks.terminal.flag_fields import REQUIRED, field

_TEXT = {".py", ".pyi", ".js", ".c", ".h", ".rst", ".md", ".txt", ".po", ".json", ".pl", ".sh"}
_LONGEST = 1 << 20  # characters of a text


class _Words(html.parser.HTMLParser):
    """Collects the text of an HTML page, without its tags."""

    def __init__(self):
        super().__init__()
        self.parts: list[str] = []

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def text_of(path: pathlib.Path) -> str | None:
    """Returns the text of a file; None if its suffix is not one of a text file."""
    name, data = path.name, path.read_bytes()
    if name.endswith(".gz"):
        name, data = name.removesuffix(".gz"), gzip.decompress(data)
    suffix = pathlib.PurePath(name).suffix
    if suffix == ".mo":
        catalog = gettext.GNUTranslations(io.BytesIO(data))._catalog  # type: ignore[attr-defined]
        return "\n".join(value for value in catalog.values() if isinstance(value, str))
    text = data.decode()
    if suffix in (".html", ".htm", ".xhp"):
        words = _Words()
        words.feed(text)
        return "".join(words.parts)
    manual = suffix[1:2].isdigit()
    return text if suffix in _TEXT or manual else None


def gather(
    folders: list[pathlib.Path], megabytes: float, languages: frozenset[str]
) -> dict[str, str]:
    """Returns path -> text of up to `megabytes` in total, an equal share from every folder.

    If there are `languages`, only those of paths with a folder of such a name.
    """
    documents: dict[str, str] = {}
    seen: set[bytes] = set()
    for folder in folders:
        room = megabytes * 1e6 / len(folders)
        paths = sorted(
            (
                path
                for path in folder.rglob("*")
                if path.is_file() and not path.is_symlink()
                if not languages or languages.intersection(path.parts)
            ),
            key=lambda path: hashlib.sha256(str(path.relative_to(folder)).encode()).digest(),
        )
        for path in paths:
            try:
                text = text_of(path)
            except (OSError, ValueError, EOFError, LookupError):  # also damaged files
                continue
            digest = hashlib.sha256((text or "").encode(errors="replace")).digest()
            if not text or len(text) > _LONGEST or digest in seen:
                continue
            seen.add(digest)
            documents[str(path)] = text
            room -= len(text.encode())
            if room < 0:
                break
    return documents


def random_words(megabytes: float) -> dict[str, str]:
    """Returns documents of 1,300 random words."""
    generator, documents, size = random.Random(0), dict[str, str](), 0
    while size < megabytes * 1e6:
        lengths = (generator.randint(3, 12) for _ in range(1300))
        words = ("".join(generator.choices(string.ascii_lowercase, k=k)) for k in lengths)
        documents[str(len(documents))] = text = " ".join(words)
        size += len(text)
    return documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    output: str = field(REQUIRED, "Parquet file to write, columns id and text")
    megabytes: float = field(120.0, "size of all texts together, in 10^6 bytes")
    languages: tuple[str, ...] = field((), "only the translations into these", metavar="A,B")
    words: bool = field(False, "random words instead")
    folders: tuple[str, ...] = field((), "further folders to read", positional=True)


def run(flags: Flags) -> None:
    """Writes the file."""
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "/usr/share")
    folders = [*map(pathlib.Path, (*installed, *flags.folders))]
    if flags.words:
        documents = random_words(flags.megabytes)
    else:
        documents = gather(folders, flags.megabytes, frozenset(flags.languages))
    table = pa.table({"id": list(documents), "text": list(documents.values())})
    pq.write_table(table, flags.output, row_group_size=1000, compression="zstd")
    size = sum(len(text.encode()) for text in documents.values())
    print(f"{flags.output}: {len(documents):,} documents, {size / 1e6:.1f} MB")


main = Command(Flags, run)

if __name__ == "__main__":
    main.start()
