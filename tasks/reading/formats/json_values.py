"""Finds the values in JSON that is not one value per line: arrays, objects over several lines."""

import codecs
import json
import re
from collections.abc import Iterable, Iterator

_SPACE = re.compile("[\ufeff \t\r\n]*")  # a byte order mark may come first
_CUT = len("e+")  # what a number can end in before its last digits, so that its beginning is one
_decode = json.JSONDecoder().raw_decode


def are_in(head: bytes, is_all: bool) -> bool:
    """Returns True if `split` reads a file that begins with `head`, and is not JSON lines.

    It holds an array whose first element is followed by another or by the file's end, or an object
    that goes on after the first line.
    """
    text = head.decode(errors="surrogateescape").lstrip("\ufeff \t\r\n")
    begin = _end_of_space(text, 1) if text.startswith("[") else 0
    try:
        value, end = _decode(text, begin)
    except (ValueError, RecursionError):
        return bool(begin) and not is_all  # the element goes on
    if not begin:
        return isinstance(value, dict) and "\n" in text[:end]
    after = text[end:].lstrip()
    return after.startswith(",") or (after.startswith("]") and not after[1:].strip())


def split(chunks: Iterable[bytes], longest: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, bytes) of the elements of arrays, and of other values, in streamed bytes.

    Raises ValueError, which names the byte, for other content, and for a value of more than about
    `longest` bytes.
    """
    source, in_array = _Source(chunks, longest), False
    while mark := source.peek():
        if mark == "[" and not in_array:
            source.skip()
            in_array = source.peek() != "]"
            if not in_array:
                source.skip()
            continue
        yield source.value()
        if in_array:
            mark = source.peek()
            if mark not in ("", ",", "]"):
                raise source.invalid()
            source.skip()
            in_array = mark != "]"
    if in_array:
        raise ValueError("it is cut short: the end of its array is missing")


class _Source:
    """Streamed bytes as text, of which only the next value is held."""

    def __init__(self, chunks: Iterable[bytes], longest: int):
        self._chunks, self._longest = iter(chunks), longest
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._text, self._at, self._ended = "", 0, False
        self._offset = 0  # bytes before `_at`

    def peek(self) -> str:
        """Skips white space and returns the character after it; "" at the end."""
        while True:
            self._take(_end_of_space(self._text, self._at))
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def skip(self) -> None:
        """Skips a character, if there is one."""
        self._take(self._at + 1)

    def value(self) -> tuple[int, bytes]:
        """Returns (offset, bytes) of the value that begins here."""
        while True:
            try:
                value, end = _decode(self._text, self._at)
                may_go_on = isinstance(value, int | float) and end + _CUT >= len(self._text)
                if not may_go_on or not self._more():
                    return self._offset, self._take(end)
            except (ValueError, RecursionError):
                if len(self._text) - self._at > self._longest or not self._more():
                    raise self.invalid() from None

    def invalid(self) -> ValueError:
        return ValueError(f"it is not valid JSON, or too long a value, at byte {self._offset:,}")

    def _take(self, end: int) -> bytes:
        taken = self._text[self._at : end].encode(errors="surrogateescape")
        self._at, self._offset = end, self._offset + len(taken)
        return taken

    def _more(self) -> bool:
        """Reads about as much text as is left; returns False at the end."""
        if self._ended:
            return False
        self._text, self._at = self._text[self._at :], 0
        read, wanted = [self._text], len(self._text) + 1
        while wanted > 0 and not self._ended:
            chunk = next(self._chunks, b"")
            self._ended = not chunk
            read.append(self._decoder.decode(chunk, final=self._ended))
            wanted -= len(read[-1])
        self._text = "".join(read)
        return True


def _end_of_space(text: str, begin: int) -> int:
    found = _SPACE.match(text, begin)
    assert found
    return found.end()
