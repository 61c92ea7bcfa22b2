"""Finding values in the bytes of a JSON line that is too long to become one Python object.

The results are those of json.loads, except that values nested more than 990 deep are invalid
whatever the interpreter's recursion limit.
"""

import codecs
import json
import re
from collections.abc import Iterator

_SPACE = re.compile(rb"[ \t\n\r]*+")
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
# Python converts integers of up to 4,300 digits.
_NUMBER = (
    rb"-?(?:(?:0|[1-9][0-9]*+)(?:\.[0-9]++(?:[eE][-+]?[0-9]++)?|[eE][-+]?[0-9]++)"
    rb"|(?:0|[1-9][0-9]{0,4299}+)(?![0-9]))"
)
_SCALAR_PATTERN = rb"(?:%s|%s|true|false|null|NaN|-?Infinity)" % (_STRING, _NUMBER)
_SCALAR = re.compile(_SCALAR_PATTERN)
_KEY = re.compile(rb"(%s)[ \t\n\r]*+:[ \t\n\r]*+" % _STRING)
# Scalar elements of an array, each with its comma: matches a vector of numbers in one call.
_ELEMENTS = re.compile(rb"(?:%s[ \t\n\r]*+,[ \t\n\r]*+)*+" % _SCALAR_PATTERN)
# As much of the inside of a string as fits without cutting an escape.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]))*+')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
_DEEPEST = 990
_CHUNK_BYTES = 1 << 20

Span = tuple[int, int]


def is_utf8(line: bytes | bytearray) -> bool:
    """Returns True if all of `line` is valid UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    view = memoryview(line)
    try:
        for start in range(0, len(view), _CHUNK_BYTES):
            decoder.decode(view[start : start + _CHUNK_BYTES])
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        return False
    return True


def find(line: bytes | bytearray, names: set[str]) -> dict[str, Span] | None:
    """Returns the spans of the values of an object's members `names`.

    If a name occurs twice, the last one counts, as in json.loads. Invalid UTF-8 counts as U+FFFD.
    Returns None if the line holds JSON other than an object.

    Raises:
      ValueError: it is not valid JSON.
    """
    try:
        return _find(line, names)
    except IndexError:
        raise ValueError("unfinished") from None


def _find(line: bytes | bytearray, names: set[str]) -> dict[str, Span] | None:
    longest = 2 + 6 * max(len(name.encode("utf-16")) for name in names)  # as \uXXXX
    spans: dict[str, Span] | None = None
    position = _space(line, 0)
    if line[position] != ord("{"):
        position = _end_of_value(line, position)
    else:
        spans = {}
        position = _space(line, position + 1)
        more = line[position] != ord("}")
        while more:
            key = _key(line, position)
            end = _end_of_value(line, key.end())
            if key.end(1) - key.start(1) <= longest:
                name = json.loads(key[1].decode(errors="replace"))
                if name in names:
                    spans[name] = (key.end(), end)
            position = _space(line, end)
            more = line[position] == ord(",")
            if more:
                position = _space(line, position + 1)
        if line[position] != ord("}"):
            raise ValueError("no end of the object")
        position += 1
    if _space(line, position) != len(line):
        raise ValueError("more after the value")
    return spans


def _space(line: bytes | bytearray, position: int) -> int:
    found = _SPACE.match(line, position)
    return found.end() if found else position


def _key(line: bytes | bytearray, position: int) -> re.Match[bytes]:
    found = _KEY.match(line, position)
    if not found:
        raise ValueError("no key")
    return found


def _end_of_value(line: bytes | bytearray, position: int) -> int:
    """Returns the end of the value that begins at `position`."""
    closers: list[int] = []  # the closing bracket of each open one
    while True:
        if closing := _CLOSING.get(line[position]):
            if len(closers) == _DEEPEST:
                raise ValueError("nested too deeply")
            position = _space(line, position + 1)
            if line[position] != closing:
                closers.append(closing)
                position = _next(line, position, closing)
                continue
            position += 1
        elif found := _SCALAR.match(line, position):
            position = found.end()
        else:
            raise ValueError("no value")
        while closers:
            position = _space(line, position)
            if line[position] == ord(","):
                position = _next(line, _space(line, position + 1), closers[-1])
                break
            if line[position] != closers.pop():
                raise ValueError("no end of a value")
            position += 1
        else:
            return position


def _next(line: bytes | bytearray, position: int, closing: int) -> int:
    """Returns the start of the next value: after its key, or after scalar elements of an array."""
    if closing == ord("}"):
        return _key(line, position).end()
    found = _ELEMENTS.match(line, position)
    return found.end() if found else position


def is_text(line: bytes | bytearray, span: Span) -> bool:
    """Returns True if the string at `span` holds no half of a surrogate pair."""
    try:
        if _SURROGATE.search(line, *span):
            for _ in characters(line, span):
                pass
    except UnicodeEncodeError:
        return False
    return True


def characters(line: bytes | bytearray, span: Span) -> Iterator[bytes]:
    """Yields the UTF-8 of the string at `span`, in chunks of whole characters.

    Raises:
      UnicodeEncodeError: it holds half a surrogate pair, which is not a character.
    """
    position, end = span[0] + 1, span[1] - 1
    half = ""  # of a pair that the next chunk may complete
    while position < end:
        found = _INSIDE.match(line, position, min(end, position + _CHUNK_BYTES))
        stop = found.end() if found else position
        while stop < end and line[stop] & 0xC0 == 0x80:  # inside a character
            stop -= 1
        text = half + json.loads(f'"{line[position:stop].decode()}"')
        if half and "\udc00" <= text[1] <= "\udfff":
            pair = text[:2].encode("utf-16", "surrogatepass").decode("utf-16")
            text = pair + text[2:]
        position, half = stop, ""
        if position < end and "\ud800" <= text[-1] <= "\udbff":
            text, half = text[:-1], text[-1]
        yield text.encode()
