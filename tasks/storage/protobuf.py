"""The wire format of protocol buffers: varints and fields.

Source: protobuf.dev/programming-guides/encoding.
"""

import functools
from collections.abc import Iterator

# Wire types. 3 and 4, groups, are obsolete.
VARINT, _FIXED64, BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


class Malformed(ValueError):
    """The bytes are not a message."""


@functools.lru_cache(maxsize=4096)  # tags and lengths repeat
def varint(value: int) -> bytes:
    """Encodes a non-negative integer."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(message: bytes | memoryview, position: int) -> tuple[int, int]:
    """Returns (the integer at `position`, the position after it).

    Raises Malformed if the message ends within the integer.
    """
    value = shift = 0
    while position < len(message):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise Malformed("a number is cut short")


def tag(number: int) -> bytes:
    """Returns the tag that precedes the length of a bytes field."""
    return varint(number << 3 | BYTES)


def field(number: int, payload: bytes) -> bytes:
    """Encodes a bytes field: a string, a message or packed integers."""
    return tag(number) + varint(len(payload)) + payload


def fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields (field number, wire type, payload) of a message's fields; integers stay encoded.

    Raises Malformed if the bytes are not a message.
    """
    position = 0
    while position < len(message):
        key, position = read_varint(message, position)
        number, kind = divmod(key, 8)
        begin = position
        if kind == VARINT:
            _, position = read_varint(message, position)
        elif kind == BYTES:
            length, begin = read_varint(message, position)
            position = begin + length
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            raise Malformed(f"wire type {kind} is not supported")
        if position > len(message):
            raise Malformed(f"field {number} is cut short")
        yield number, kind, message[begin:position]
