"""Command-line flags for dataclasses whose fields are made by `fields.field`.

A nested dataclass gives its flags a prefix, as in --optimizer.learning_rate. A value follows "=" or
is the next word; "-" in a name is read as "_". A bool without a value is true. A tuple's values are
separated by commas, or given by several uses of the flag; a text that is `joined` may be given in
parts, too. Any other flag has one value: giving two is a mistake.
"""

import dataclasses
import functools
import itertools
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tasks import annexes
from tasks.terminal import foreign_flags
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import (
    NONE,
    REQUIRED,
    Rejected,
    Unread,
    check,
    field,
    kind_in_words,
    parse_value,
)

_Kind = TypeVar("_Kind")


class Flag(NamedTuple):
    """The flag of a field.

    `path` is the field's path within the dataclass of all flags, `name` the text after "--",
    `group` the nested dataclass that contains the field, or "", and `title` describes the group.
    """

    path: str
    name: str
    declared: Any
    field: dataclasses.Field[Any]
    group: str
    title: str
    required: bool

    @property
    def is_tuple(self) -> bool:
        return tuple in (
            typing.get_origin(each) for each in (self.declared, *typing.get_args(self.declared))
        )

    @property
    def is_place(self) -> bool:
        return bool(self.field.metadata["positional"])

    @property
    def words(self) -> str:
        return self.field.metadata["words"]

    @property
    def names(self) -> list[str]:
        prefix = self.name.removesuffix(self.field.metadata["name"] or self.field.name)
        former = self.field.metadata["aliases"]
        return [self.name, *(each[2:] if each[:2] == "--" else prefix + each for each in former)]

    def parsed(self, name: str, text: str) -> Any:
        """Parses the text given with `name`; raises UserError if it has the wrong type."""
        declared = self.declared
        if self.field.metadata["repeated"] or (self.is_tuple and self.is_place):
            declared = typing.get_args(declared)[0]
        try:
            return parse_value(text, declared, self.field.metadata["choices"])
        except ValueError as error:
            raise UserError(f"--{name}={text}: it must be {kind_in_words(declared)}") from error


class Given(NamedTuple):
    """The values of a command line, and the flags as typed ("--name=text"), by field path."""

    values: dict[str, Any]
    typed: dict[str, str]

    def give(self, flag: Flag, name: str, text: str) -> None:
        """Sets or extends the value of a flag given as `name`; refuses a second, other value."""
        value = flag.parsed(name, text)
        if flag.field.metadata["repeated"] or (flag.is_tuple and flag.is_place):
            value = (value,)
        before = self.values.get(flag.path)
        joint = flag.field.metadata["joined"]
        if before is not None and value is not None and (flag.is_tuple or joint):
            value = before + (joint or ()) + value
        elif flag.path in self.values and before != value:
            raise UserError(f"{self.typed[flag.path]} and --{name}={text}: give one of them")
        self.values[flag.path], self.typed[flag.path] = value, f"--{name}={text}"

    def below(self, path: str) -> "Given":
        """Returns the flags of the nested dataclass at `path`."""
        start = f"{path}."
        values, typed = (
            {key.removeprefix(start): value for key, value in each.items() if key.startswith(start)}
            for each in self
        )
        return Given(values, typed)


@functools.cache
def flags_of(kind: type) -> tuple[Flag, ...]:
    """Returns the flags of a dataclass, in the order of its fields."""
    return tuple(_walk(kind, "", "", ("", ""), False))


@functools.cache
def extended(kind: Any) -> type:
    """Returns a dataclass of flags with those of annexes, from the slot named by its `ANNEXES`.

    An entry NAME of the slot is a dataclass, which becomes the group NAME, without a prefix.
    """
    own = {each.name for each in dataclasses.fields(kind)}
    parts = annexes.loaded(getattr(kind, "ANNEXES", "")).items()
    groups = []
    for name, part in [(name, part) for name, part in parts if name not in own]:
        title = (part.__doc__ or "").partition("\n")[0].rstrip(".")
        groups.append((name, part, field(part, title, flat=True)))
    if not groups:
        return kind
    whole = dataclasses.make_dataclass(
        kind.__name__, groups, bases=(kind,), frozen=True, kw_only=True
    )
    whole.__module__ = kind.__module__
    return whole


def groups_of_annexes(flags: Any) -> list[Any]:
    """Returns the groups of flags that annexes have added; none if no word named one of them."""
    return [getattr(flags, name) for name in annexes.entries(flags.ANNEXES) if hasattr(flags, name)]


def given_flags(kind: Any, words: Sequence[str]) -> Any:
    """Returns the flags of a command line, as `parse` and `made` read them.

    Flags of annexes are imported only if `kind` lacks a flag that the words name.
    """
    known = {name: flag for flag in flags_of(kind) for name in flag.names}
    before = itertools.takewhile(lambda word: word != "--", words)
    if not all(_named(word, known)[1] for word in before if word.startswith("--")):
        kind = extended(kind)
    return made(kind, parse(kind, words))


def names_of(flags: object) -> list[str]:
    """Returns all names of all flags of a dataclass instance."""
    kind: type = type(flags)
    return [name for flag in flags_of(kind) for name in flag.names]


def _walk(
    kind: Any, path: str, prefix: str, group: tuple[str, str], partial: bool
) -> Iterator[Flag]:
    hints = typing.get_type_hints(kind)
    for each in dataclasses.fields(kind):
        if not each.metadata:  # set only by code
            continue
        declared = each.metadata["partial"] or hints[each.name]
        if not dataclasses.is_dataclass(declared):
            required = each.default is REQUIRED and each.default_factory is REQUIRED
            name = prefix + (each.metadata["name"] or each.name)
            yield Flag(path + each.name, name, declared, each, *group, required and not partial)
            continue
        inner = prefix if each.metadata["flat"] else f"{prefix}{each.name}."
        of = group if prefix and group[0] else (each.name, each.metadata["words"])
        some = partial or each.metadata["partial"] is not None
        yield from _walk(declared, f"{path}{each.name}.", inner, of, some)


def parse(kind: type, words: Sequence[str]) -> Given:
    """Returns the values of a command line.

    Raises UserError for a flag that is unknown, missing, given two values, or of the wrong type.
    """
    flags = flags_of(kind)
    known = {name: flag for flag in flags for name in flag.names}
    places = [flag for flag in flags if flag.is_place or flag.field.metadata["bare"]]
    given, names, rest = Given({}, {}), dict[str, str](), list[str]()
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--" or not word.startswith("--"):
            for text in pending if word == "--" else [word]:
                _place(text, places, given, rest)
            if word == "--":
                break
            continue
        name, flag, typed = _named(word, known)
        if flag is None:
            rest.append(word)
            continue
        text = _value(name, flag, pending) if typed is None else typed
        if name in flag.names[1:] and text in NONE:  # an unset former name
            continue
        if not flag.field.metadata["repeated"] and names.get(flag.path, name) != name:
            raise UserError(f"--{names[flag.path]} and --{name} are the same: set one of them")
        names[flag.path] = name
        given.give(flag, name, text)
    _finish(flags, known, given, rest)
    return given


def _named(word: str, known: Mapping[str, Flag]) -> tuple[str, Flag | None, str | None]:
    """Splits "--name=text" into (name, its flag or None, the text or None)."""
    name, equals, text = word[2:].partition("=")
    plain = name.replace("-", "_")
    if plain in known:
        return plain, known[plain], text if equals else None
    begin, dot, end = name.partition(".")
    if dot and f"{begin}.*" in known:  # the flag takes all of them, as NAME=VALUE
        return name, known[f"{begin}.*"], f"{end}{equals}{text}"
    return name, None, None


def _value(name: str, flag: Flag, pending: list[str]) -> str:
    """Takes the text of a flag without "=" from `pending`."""
    alone = "true" if flag.declared is bool else flag.field.metadata["alone"]
    follows = bool(pending) and not pending[0].startswith("--")
    if flag.declared is bool:
        follows = follows and pending[0].lower() in ("true", "false")
    if follows:
        return pending.pop(0)
    if alone is None:
        raise UserError(f"--{name} needs a value")
    return alone


def _place(text: str, places: list[Flag], given: Given, rest: list[str]) -> None:
    """Gives a word without "--" to the next field that takes one, or to the rest."""
    if not places:
        rest.append(text)
        return
    lasts = places[0].is_tuple or places[0].field.metadata["joined"]
    flag = places[0] if lasts else places.pop(0)
    given.give(flag, flag.name, text)


def _finish(flags: Sequence[Flag], known: Collection[str], given: Given, rest: list[str]) -> None:
    """Gives the rest to the field that takes it; refuses unknown words and missing flags."""
    takes = next((flag for flag in flags if flag.field.metadata["rest"]), None)
    missing = [flag for flag in flags if flag.required and flag.path not in given.values]
    if missing and rest and not rest[0].startswith("-") and "=" not in rest[0]:
        raise UserError(f"unknown flag {rest[0]} (did you mean {spelled(missing[0])}={rest[0]}?)")
    if takes:
        given.values[takes.path] = tuple(rest)
    else:
        refuse_unknown(rest, known)
    if missing:
        if takes:
            takes.field.metadata["rest"](rest, known)
        raise UserError(f"required: {', '.join(map(spelled, missing))}")


def spelled(flag: Flag) -> str:
    """Returns a flag or positional value as typed."""
    if flag.is_place:
        return flag.field.metadata["metavar"] or flag.name.upper()
    return f"--{flag.name}"


def refuse_unknown(words: Sequence[str], known: Collection[str]) -> None:
    """Raises a UserError that names the first unknown word, if any."""
    if not words:
        return
    word = words[0].partition("=")[0]
    raise UserError(f"unknown flag {word}{foreign_flags.hint(word, known)}")


def made(kind: type[_Kind], given: Given, prefix: str = "") -> _Kind:
    """Makes the dataclass from the given flags; raises UserError if it rejects a value.

    The names of its flags begin with `prefix`.
    """
    hints, values = typing.get_type_hints(kind), {}
    for each in dataclasses.fields(typing.cast(Any, kind)):
        if each.metadata.get("partial"):
            values[each.name] = given.below(each.name)
        elif dataclasses.is_dataclass(hints[each.name]):
            inner = prefix if each.metadata["flat"] else f"{prefix}{each.name}."
            values[each.name] = made(hints[each.name], given.below(each.name), inner)
        elif each.name in given.values:
            values[each.name] = given.values[each.name]
    try:
        config = kind(**values)
        check(config)
    except Rejected as error:
        raise refusal(error, given.typed.get(error.field, f"--{prefix}{error.field}")) from error
    return config


def refusal(error: Rejected, typed: str) -> UserError:
    """Returns the message about a rejected flag; `typed` is "--name=text"."""
    if isinstance(error, Unread):
        return UserError(f"{typed.partition('=')[0]} has no effect {error.why}")
    return UserError(f"{typed}: it must be {error.rule}")
