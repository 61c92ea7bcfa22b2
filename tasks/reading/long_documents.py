"""Splits documents that are too long.

While more than `longest` bytes of UTF-8 remain, a part ends at the last Unicode white space that
keeps it within `longest` bytes, and that one character is dropped. Without white space, the part
ends between two characters.

Documents are streamed, never held whole; each part's UTF-8 is checked separately.
"""

import codecs
import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

Text = str | bytes | None
# A text, or the inputs and targets of a pair; None if the document has a problem.
Content = Text | tuple[Text, ...]
# (id, content, problem, part, place): see `sources.read`. Bytes are UTF-8.
Document = tuple[str, Content, str | None, int, str]

# Longer documents are split: SentencePiece needs up to 150 bytes of memory per byte of text.
LONGEST_DOCUMENT_BYTES = 256 << 10
_CHUNK_BYTES = 1 << 20
# Characters for which str.isspace() is True, in UTF-8; group 1 is the last one.
_LAST_SPACE = re.compile(
    rb"(?s).+([\t-\r\x1c-\x20]|\xc2[\x85\xa0]|\xe1\x9a\x80"
    rb"|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80)"
)


def is_utf8(data: bytes | bytearray) -> bool:
    """Returns True if all of `data` is valid UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with contextlib.suppress(UnicodeDecodeError):
        for chunk in chunked(data):
            decoder.decode(chunk)
        decoder.decode(b"", True)
        return True
    return False


def chunked(data: Any) -> Iterator[bytes]:
    """Yields the bytes of any buffer, in chunks."""
    view = memoryview(data)
    return (bytes(view[i : i + _CHUNK_BYTES]) for i in range(0, len(view), _CHUNK_BYTES))


def parts(name: str, chunks: Iterable[bytes], longest: int, place: str) -> Iterator[Document]:
    """Yields a streamed document, in parts if it is long; checks each part's UTF-8."""
    pieces = split(chunks, longest)
    first, second = next(pieces), next(pieces, None)
    more = [] if second is None else [second]
    for number, piece in enumerate(itertools.chain([first], more, pieces), len(more)):
        part = f"{name}#part{number}" if number > 1 else name
        valid = is_utf8(piece)
        yield part, piece if valid else None, None if valid else "invalid UTF-8", number, place


def split(chunks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Yields the parts of streamed bytes, at least one."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        # Wait for one whole character beyond the longest part: it may be the space to cut at.
        while len(rest) >= longest + 4:
            yield _pop_part(rest, longest)
    while len(rest) > longest:
        yield _pop_part(rest, longest)
    yield bytes(rest)


def _pop_part(rest: bytearray, longest: int) -> bytes:
    """Removes and returns the first part of `rest`, which has more than `longest` bytes."""
    found = _LAST_SPACE.match(rest, 0, longest + 3)
    while found and found.start(1) > longest:
        found = _LAST_SPACE.match(rest, 0, found.start(1))
    stop = begin = longest
    if found:
        stop, begin = found.span(1)
    while not found and stop > longest - 3 and rest[stop] & 0xC0 == 0x80:  # inside a character
        stop = begin = stop - 1
    part = bytes(memoryview(rest)[:stop])
    del rest[:begin]
    return part
