"""Finding values in a line of JSON too long to become one Python object, on its bytes.

What is valid and what it means is as for json.loads, save that what is nested more than 990 deep is
invalid whatever the interpreter's recursion limit.
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
# Elements of an array, each with its comma: one call for all numbers of a vector but the last.
_ELEMENTS = re.compile(rb"(?:%s[ \t\n\r]*+,[ \t\n\r]*+)*+" % _SCALAR_PATTERN)
# As much of the inside of a string as fits without cutting an escape.
_INSIDE = re.compile(rb'(?:[^"\\]++|\\(?:u[0-9a-fA-F]{4}|[^u]))*+')
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_CLOSING = {ord("{"): ord("}"), ord("["): ord("]")}
_DEEPEST = 990
_CHUNK_BYTES = 1 << 20

Span = tuple[int, int]


def is_utf8(line: bytes | bytearray) -> bool:
    """Whether all of `line` is UTF-8."""
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
    """Returns where the values of an object's members `names` begin and end.

    Of a member that is there twice it is the last, as in json.loads. None: `line`, which is UTF-8,
    holds JSON that is no object.

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
                name = json.loads(key[1].decode())
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
    """Where the value that begins at `position` ends."""
    open_ones: list[int] = []  # how each bracket that is open will close
    while True:
        if closing := _CLOSING.get(line[position]):
            if len(open_ones) == _DEEPEST:
                raise ValueError("nested too deeply")
            position = _space(line, position + 1)
            if line[position] != closing:
                open_ones.append(closing)
                position = _next(line, position, closing)
                continue
            position += 1
        elif found := _SCALAR.match(line, position):
            position = found.end()
        else:
            raise ValueError("no value")
        while open_ones:
            position = _space(line, position)
            if line[position] == ord(","):
                position = _next(line, _space(line, position + 1), open_ones[-1])
                break
            if line[position] != open_ones.pop():
                raise ValueError("no end of a value")
            position += 1
        else:
            return position


def _next(line: bytes | bytearray, position: int, closing: int) -> int:
    """Where the next value to look at begins: after its key, or after elements that are scalars."""
    if closing == ord("}"):
        return _key(line, position).end()
    found = _ELEMENTS.match(line, position)
    return found.end() if found else position


def is_text(line: bytes | bytearray, span: Span) -> bool:
    """Whether the string at `span` has no half of a surrogate pair, which is no character."""
    try:
        if _SURROGATE.search(line, *span):
            for _ in characters(line, span):
                pass
    except UnicodeEncodeError:
        return False
    return True


def characters(line: bytes | bytearray, span: Span) -> Iterator[bytes]:
    """Yields the UTF-8 of the string at `span`, in chunks that cut no character.

    Raises:
      UnicodeEncodeError: it has half a surrogate pair.
    """
    position, end = span[0] + 1, span[1] - 1
    half = ""  # of a pair that the next chunk may complete
    while position < end:
        found = _INSIDE.match(line, position, min(end, position + _CHUNK_BYTES))
        stop = found.end() if found else position
        while stop < end and line[stop] & 0xC0 == 0x80:  # inside a character: go back to its begin
            stop -= 1
        text = half + json.loads(f'"{line[position:stop].decode()}"')
        if half and "\udc00" <= text[1] <= "\udfff":
            pair = text[:2].encode("utf-16", "surrogatepass").decode("utf-16")
            text = pair + text[2:]
        position, half = stop, ""
        if position < end and "\ud800" <= text[-1] <= "\udbff":
            text, half = text[:-1], text[-1]
        yield text.encode()
