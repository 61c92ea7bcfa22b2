"""`palimpsest COMMAND …` runs any command of this project by a short name."""

import sys
from collections.abc import Sequence
from typing import NoReturn

from palimpsest.commands import COMMANDS, GROUPS, command, summary
from tasks import annexes
from tasks.terminal import command_line, extras, programs
from tasks.terminal.command_line import UserError, nearest

_PROGRAM = "palimpsest"
_VERSION = "--version"


def named(words: Sequence[str]) -> tuple[str, list[str]]:
    """Splits words into (a known command's name or "", the words after it); reads "-" as "_"."""
    plain = [word.replace("-", "_") if word[:1] != "-" else word for word in words[:2]]
    for count in (2, 1):
        name = " ".join(plain[:count])
        if name in COMMANDS:
            return name, list(words[count:])
    return "", list(words)


def page(start: str = "") -> str:
    """Returns the commands whose names begin with `start`, in groups, one per line."""
    lines = [f"usage: {_PROGRAM} COMMAND [--FLAG=VALUE …], or {_PROGRAM} {_VERSION}"]
    for group, commands in GROUPS.items():
        found = {name: module for name, module in commands.items() if name.startswith(start)}
        if found:
            lines += ["", f"{group}:"]
            lines += [f"  {name:<21} {summary(module)}" for name, module in found.items()]
    lines += ["", f"{_PROGRAM} COMMAND --help shows the flags of a command."]
    lines += annexes.entries("words_help").values()
    return "\n".join(lines)


def _variant(name: str, words: Sequence[str]) -> str | None:
    """Returns the module of the command that takes a command's place because of a flag."""
    flags = (word.partition("=")[0] for word in words)
    known = annexes.entries("variants")
    return next((known[key] for flag in flags if (key := f"{name} {flag}") in known), None)


def _run(words: list[str]) -> None:
    first = words[0] if words else "--help"
    if answer := annexes.get("words", first):
        answer(words[1:])
    elif first in ("--help", "-h"):
        print(page())
    elif first == _VERSION:
        print(f"{extras.DISTRIBUTION} {extras.version()}")
    elif any(name.startswith(f"{first} ") for name in COMMANDS) and words[1:] in ([], ["--help"]):
        print(page(f"{first} "))
    else:
        name = " ".join(word for word in words[:2] if not word.startswith("-"))
        known = [*COMMANDS, *annexes.entries("words_help")]
        hint = nearest(name, COMMANDS) or nearest(first, known)
        raise UserError(f"unknown command {name or first}{hint}; {_PROGRAM} --help lists them")


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Runs a command line and exits."""
    given = [*(sys.argv[1:] if words is None else words)]
    name, rest = named(given)
    if name:
        module = _variant(name, rest) or COMMANDS[name]
        program = f"{_PROGRAM} {name}"
        with programs.named({module: f"{_PROGRAM} {name}" for name, module in COMMANDS.items()}):
            command_line.run(lambda words: command(module).start(words, program), rest, program)
    command_line.run(_run, given, _PROGRAM)


if __name__ == "__main__":
    main()
