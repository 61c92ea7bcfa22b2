"""Texts that Python or a command line gives: checks, lists, and short forms."""

import reprlib

from tasks.terminal.command_line import UserError


def checked(text: object, name: str) -> str:
    """Returns a text; raises UserError, which begins with `name`, for what no UTF-8 spells."""
    if not isinstance(text, str):
        raise UserError(f"{name} must be a text, not {shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise UserError(f"{name} has half a character, {half!r}: remove it, or decode it") from None
    return text


def listed(text: str) -> list[str]:
    """Returns the parts of a list, which are separated by commas, or by ; if it contains any."""
    return [part.strip() for part in text.split(";" if ";" in text else ",")]


def shown(value: object) -> str:
    """Returns a short form of a value, in one line, for messages."""
    return " ".join(reprlib.repr(value).split())
