"""The text of --help: usage, description, and flags by group."""

import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from tasks.terminal.command_line import UserError, nearest
from tasks.terminal.flag_fields import REQUIRED, as_flag
from tasks.terminal.flags import Flag, flags_of, spelled

ALL = "all"
# With more flags than this, --help shows only the frequent ones.
_MANY = 60
_INDENT = 26
# Width of the names in the short list.
_BRIEF = 32
# Longer lists of choices would not fit beside their flag; its help text names them.
_LONGEST_METAVAR = 50
_METAVARS = {bool: "true|false", int: "N", float: "X", str: "TEXT", tuple: "A,B"}


def page(kind: Any, program: str, description: str, topic: str = "") -> str:
    """Returns the help of a command.

    The dataclass `kind` may add topics with `help_topics()` (name -> function) and defaults to show
    with `help_defaults()` (path -> value). `topic` is "", `ALL`, a group of flags, or a topic;
    an unknown one raises UserError.
    """
    topics = kind.help_topics() if hasattr(kind, "help_topics") else {}
    if topic in topics:
        return topics[topic]()
    defaults = kind.help_defaults() if hasattr(kind, "help_defaults") else {}
    titles = {flag.group: flag.title for flag in flags_of(kind) if flag.group}
    flags = [flag for flag in flags_of(kind) if not flag.field.metadata["rest"]]
    if topic in titles:
        return "\n".join(_group(topic, titles, flags, defaults))
    if topic not in ("", ALL):
        known = [ALL, *topics, *titles]
        raise UserError(
            f"--help={topic}: no such group{nearest(topic, known)}; use one of {', '.join(known)}"
        )
    lines = [f"usage: {program} {_usage(flags)}", "", _filled(description), ""]
    if not topic and len(flags) > _MANY:
        often = [flag for flag in flags if flag.field.metadata["often"]]
        first = next(iter(titles), "")
        often.sort(key=lambda flag: flag.group not in ("", first))
        lines += [_brief(flag, defaults) for flag in often]
        text = f"--help={ALL} shows all {len(flags)} flags, --help=GROUP one group: "
        lines += ["", textwrap.fill(text + ", ".join([*topics, *titles]), _width())]
    else:
        for group in ("", *titles):
            lines += _group(group, titles, flags, defaults)
    return "\n".join(lines)


def _group(
    group: str, titles: Mapping[str, str], flags: Iterable[Flag], defaults: Mapping[str, Any]
) -> list[str]:
    some = [_described(flag, defaults) for flag in flags if flag.group == group]
    title = [f"{group}:", f"  {titles[group]}", ""] if group else []
    return [*title, *some, ""] if some else []


def _brief(flag: Flag, defaults: Mapping[str, Any]) -> str:
    value = "" if _is_switch(flag) else f"={metavar(flag)}"
    if len(value) > _INDENT // 2:
        value = "=NAME"
    words = f"{flag.field.metadata['often']}{_default(flag, defaults)}"
    last = flag.name.rpartition(".")[2]
    short = last if f"--{last}" in flag.field.metadata["aliases"] else flag.name
    return f"  --{short}{value}".ljust(_BRIEF) + f" {words}"


def _usage(flags: Iterable[Flag]) -> str:
    parts = []
    for flag in flags:
        if flag.field.metadata["positional"]:
            name = spelled(flag) + " …" * flag.is_tuple
            parts.append(name if flag.required else f"[{name}]")
        elif flag.required:
            parts.append(f"--{flag.name}={metavar(flag)}")
    return " ".join([*parts, "[--FLAG=VALUE …]"])


def metavar(flag: Flag) -> str:
    """Returns the placeholder for a flag's value."""
    metadata = flag.field.metadata
    if metadata["metavar"]:
        return metadata["metavar"]
    if metadata["choices"]:
        choices = f"{{{','.join(map(str, metadata['choices']))}}}"
        return choices if len(choices) <= _LONGEST_METAVAR else "NAME"
    declared = typing.get_args(flag.declared)[0] if metadata["repeated"] else flag.declared
    return _METAVARS[_plain(declared)]


def _plain(declared: Any) -> type:
    """Returns the plain type: int for `int | None`, tuple for `tuple[str, ...]`."""
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        return _plain(next(each for each in typing.get_args(declared) if each is not type(None)))
    return typing.get_origin(declared) or declared


def _is_switch(flag: Flag) -> bool:
    return flag.declared is bool and flag.field.default is False


def _default(flag: Flag, defaults: Mapping[str, Any]) -> str:
    """Returns " (default: X)", or "" if the default says nothing."""
    default = defaults.get(flag.path, flag.field.default)
    silent = default in (REQUIRED, None, False, "", ()) or "(default" in flag.words
    return "" if silent else f" (default: {as_flag(default)})"


def _described(flag: Flag, defaults: Mapping[str, Any]) -> str:
    head = spelled(flag)
    if not flag.field.metadata["positional"]:
        alone = flag.field.metadata["alone"] is not None
        value = f"[={metavar(flag)}]" if alone else f"={metavar(flag)}"
        names = [name for name in flag.names if not name.endswith(".*")]
        head = ", ".join(f"--{name}{'' if _is_switch(flag) else value}" for name in names)
    words = flag.words + _default(flag, defaults)
    lines = textwrap.wrap(words, _width() - _INDENT, break_on_hyphens=False)
    text = textwrap.indent("\n".join(lines), " " * _INDENT)
    if len(head) < _INDENT - 3:
        return f"  {head}{text[len(head) + 2 :]}"
    return f"  {head}\n{text}"


def _filled(text: str) -> str:
    """Returns paragraphs that fit the terminal; indented ones keep their lines."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(
        each if "\n " in f"\n{each}" else textwrap.fill(each, _width()) for each in paragraphs
    )


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 100) - 2
