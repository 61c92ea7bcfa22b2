"""Translates gin bindings into configuration fields with tables of configurables and arguments.

Anything that a table does not list is an error.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tasks.terminal.command_line import UserError, nearest
from trainer.annexes.gin.reader import (
    COMMANDS,
    FLAXFORMER,
    Binding,
    Macros,
    Reference,
    Statements,
    Value,
    references,
)

# Default of an argument that a file must set if its configurable is used.
MUST = object()
# Default of an argument that is ignored unless a file sets it.
UNSET = object()


def _other(binding: Binding) -> str | None:
    """Returns what to do about a binding of another command or of Flaxformer."""
    hint = COMMANDS.get(binding.selector.rpartition(".")[2])
    return FLAXFORMER if binding.selector.startswith("flaxformer.") else hint


@dataclasses.dataclass(frozen=True)
class Argument:
    """The meaning of an argument, given by one of these attributes.

    `field`: path of the configuration field that receives the value after `convert`;
    `refers`: configurables that the argument may name, or None if `optional`;
    `only`: the only supported value, with synonyms `same`; `why` explains the restriction;
    `take`: a function called with (reading, value), for all other cases, and, if it keeps the
    value for later, its key `fact` in `facts`.
    Without any, the argument has no counterpart: `why` is reported unless the value is `default`.
    """

    default: Any = UNSET
    field: str = ""
    convert: Callable[[Any], Any] | None = None
    refers: tuple[Configurable, ...] = ()
    optional: bool = False
    only: Any = UNSET
    same: tuple[Any, ...] = ()
    take: Callable[[Reading, Value], None] | None = None
    fact: str = ""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Configurable:
    """A configurable with its full names (messages use the first); using it sets `fields`."""

    names: tuple[str, ...]
    arguments: Mapping[str, Argument]
    fields: Mapping[str, Any]

    @property
    def short(self) -> str:
        return self.names[0].rpartition(".")[2]


def configurable(*names: str, fields: Any = None, **arguments: Argument) -> Configurable:
    """Returns a configurable, given its arguments as keywords and the fields that its use sets."""
    return Configurable(names, arguments, fields or {})


def field(path: str, default: Any = UNSET, convert: Callable[[Any], Any] | None = None) -> Argument:
    """Returns an argument that sets a field; unset arguments have T5X's `default`."""
    return Argument(default=default, field=path, convert=convert)


def refers(*known: Configurable, optional: bool = False, default: Any = MUST) -> Argument:
    """Returns an argument that names one of the configurables."""
    return Argument(default=default, refers=known, optional=optional)


def only(value: Any, why: str, *same: Any) -> Argument:
    """Returns an argument with one supported value; `same` lists its synonyms."""
    return Argument(only=value, same=same, why=why)


def nothing(why: str, default: Any = UNSET) -> Argument:
    """Returns an argument without a counterpart; values other than `default` are reported."""
    return Argument(default=default, why=why)


def take(function: Callable[[Reading, Value], None], default: Any = UNSET) -> Argument:
    """Returns an argument interpreted by a function."""
    return Argument(default=default, take=function)


def is_size(value: Any) -> bool:
    """Returns whether a value is a whole number above 0."""
    return type(value) is int and value > 0


def partitions(value: Any) -> Any:
    """Checks a number of model-parallel devices and replaces None with 1."""
    if type(value) is int and value < 1:
        raise ValueError("it must be 1 or more")
    return 1 if value is None else value


def keep(name: str, kind: Any, default: Any = UNSET) -> Argument:
    """Returns an argument kept in `facts` because its meaning depends on other arguments.

    The value must have type `kind` (object: any). Its key is `name`, or SCOPE/NAME in a scope.
    """

    def note(reading: Reading, found: Value) -> None:
        found = Value(typed(found, name, kind), found.origin)
        reading.facts[f"{reading.scope}/{name}" if reading.scope else name] = found

    return Argument(default=default, take=note, fact=name)


class _Facts(dict[str, Value]):
    """Values by key; `used` has the keys that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[str] = set()

    def __getitem__(self, key: str) -> Value:
        self.used.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return super().get(key, default)


class Reading:
    """The meaning of files, collected while they are read.

    `fields` has values by configuration path, `facts` the values that table functions share,
    `notes` the lines to print, and `scope` the current binding's scope.
    """

    def __init__(self, statements: Statements, known: Iterable[Configurable]):
        self.statements = statements
        self.macros = Macros(statements.bindings)
        self.fields: dict[str, Value] = {}
        self.notes: list[tuple[str, str]] = []
        self.facts = _Facts()
        self._kept: dict[str, str] = {}
        self._reads_all = False
        self.scope = ""
        self._known = tuple(known)
        self._bound: dict[tuple[str, str, str], Binding] = {}
        self._used: set[tuple[str, str, str]] = set()
        # An error about what the files are for is clearer than one about an unknown name.
        for binding in sorted(statements.bindings, key=lambda each: _other(each) is None):
            if binding.argument:
                self._bound[self._key(binding)] = binding
        self._twice()

    def warn(self, text: str) -> None:
        """Notes a valid choice that has consequences."""
        self.notes.append(("warning", text))

    def idle(self, text: str) -> None:
        """Notes a binding without effect here."""
        self.notes.append(("read, no counterpart", text))

    def set(self, path: str, value: Any, origin: str) -> None:
        self.fields[path] = Value(value, origin)

    def walk(self, configurable: Configurable, scope: str = "", origin: str = "") -> None:
        """Reads a configurable's arguments in a scope, and everything that they refer to."""
        for path, value in configurable.fields.items():
            self.set(path, value, f"{origin} as @{configurable.short}()")
        for name, argument in configurable.arguments.items():
            binding = self._binding(configurable, scope, name)
            if binding is not None:
                prefix = f"{scope}/" if scope else ""
                self._argument(f"{prefix}{configurable.short}.{name}", argument, binding)
            elif argument.default is MUST:
                raise UserError(
                    f"none of these files sets {configurable.short}.{name}: include one that "
                    "sets it, such as 't5x/configs/runs/pretrain.gin', or set "
                    f"--gin.{configurable.short}.{name}=VALUE"
                )
            elif argument.default is not UNSET:
                default = Value(argument.default, f"T5X's default of {configurable.short}.{name}")
                if argument.field:
                    self.set(argument.field, *default)
                elif argument.take:
                    argument.take(self, default)

    def everything(self, scopes: Iterable[str]) -> None:
        """Reads every binding of these scopes, shorter scopes first; errors name file and line.

        This is for files that never refer to the configurables that they bind.
        """
        self._reads_all = True
        order = sorted(self._bound.items(), key=lambda item: len(item[0][0]))
        scoped: dict[str, tuple[str, Value]] = {}
        for (scope, name, argument), binding in order:
            if scope not in scopes:
                continue
            self.scope = scope
            self._used.add((scope, name, argument))
            configurable, meaning = self._meaning(name, argument)
            short = f"{configurable.short}.{argument}"
            self._argument(short, meaning, binding)
            if not scope or not meaning.field:
                continue
            found = self.fields[meaning.field]
            other, value = scoped.setdefault(meaning.field, (scope, found))
            if other != scope and value.value != found.value:
                raise UserError(
                    f"{found.origin}: {scope}/{short} = {found.value!r} differs from "
                    f"{other}'s {value.value!r} ({value.origin}): here, they must be the same"
                )

    def follow(
        self, name: str, found: Value, known: tuple[Configurable, ...], optional: bool = False
    ) -> None:
        """Walks the configurable among `known` that a value must refer to."""
        reference = found.value
        if reference is None and optional:
            return
        if isinstance(reference, Reference):
            for configurable in known:
                if _names(configurable, reference.name):
                    self.walk(configurable, reference.scope, found.origin)
                    return
        wanted = [*(f"@{each.short}" for each in known), *(["None"] if optional else [])]
        rule = f"{' or '.join(wanted)}; files are read, and nothing in them is executed"
        raise found.must_be(name, rule)

    def finish(self, macros: Iterable[str]) -> None:
        """Reports macros and bindings that were never read; `macros` are names of known macros."""
        known = {*macros, *self.macros.named()}
        for binding in self.macros.unread():
            if binding.library or binding.name in known - {*macros}:
                continue
            hint = "" if binding.name in known else nearest(binding.name, known)
            self.warn(f"{binding.name} ({binding.place}) is read by none of these files{hint}")
        for key, binding in self._bound.items():
            if key not in self._used and not binding.library:
                why = self._meaning(*key[1:])[1].why or "nothing in these files refers to it"
                self.idle(f"{binding.name} ({binding.place}): {why}")

    def report_unused(self) -> None:
        """Reports the users' bindings that were kept for other settings, but not looked up."""
        for key in [each for each in self._kept if each not in self.facts.used]:
            name, (value, origin) = self._kept[key], self.facts[key]
            if value is not None:
                self.idle(f"{name} = {value!r} ({origin}): it has no effect on this run")

    def _meaning(self, name: str, argument: str) -> tuple[Configurable, Argument]:
        found = next(each for each in self._known if each.names[0] == name)
        return found, found.arguments[argument]

    def _argument(self, name: str, argument: Argument, binding: Binding) -> None:
        if argument.why and argument.only is UNSET and self.macros.unset(binding):
            self.idle(f"{name} ({binding.place}): {argument.why}")
            return
        found = self.macros.resolve(binding)
        for reference in references(found.value):
            self._configurable(reference, found.origin)
        if argument.refers:
            self.follow(name, found, argument.refers, argument.optional)
        elif argument.field:
            try:
                value = argument.convert(found.value) if argument.convert else found.value
            except ValueError as error:
                raise UserError(f"{found.origin}: {name} = {found.value!r}: {error}") from error
            self.set(argument.field, value, found.origin)
        elif argument.take:
            argument.take(self, found)
            if argument.fact and not binding.library:
                self._kept[f"{self.scope}/{argument.fact}".removeprefix("/")] = name
        elif argument.only is not UNSET:
            if _plain(found.value) not in (argument.only, *argument.same):
                raise UserError(
                    f"{found.origin}: {name} = {found.value!r} is not supported, only "
                    f"{argument.only!r}: {argument.why}"
                )
        else:
            said = found.value != argument.default and not binding.library
            if said:
                self.idle(f"{name} = {found.value!r} ({found.origin}): {argument.why}")
            for reference in references(found.value):
                self._cover(reference, found.origin, argument.why, said)

    def _cover(self, reference: Reference, origin: str, why: str, said: bool) -> None:
        """Marks as read the bindings of an unsupported configurable and its references.

        Reports the users' own, with their reason or `why`, unless `why` was said.
        """
        configurable = self._configurable(reference, origin)
        for key, binding in self._bound.items():
            here = key[0] in ("", reference.scope) and key[1] == configurable.names[0]
            if here and key not in self._used:
                self._used.add(key)
                if self.macros.unset(binding):
                    continue
                value, where = self.macros.resolve(binding)
                argument = configurable.arguments[binding.argument]
                own = argument.why if argument.only is UNSET else ""
                told = self._reads_all or (said and own in ("", why))
                if not (told or binding.library or value == argument.default):
                    self.idle(f"{binding.name} = {value!r} ({where}): {own or why}")
                for inner in references(value):
                    self._cover(inner, where, why, said or not binding.library)

    def _configurable(self, reference: Reference, origin: str) -> Configurable:
        for each in self._known:
            if _names(each, reference.name):
                return each
        raise UserError(
            f"{origin}: {reference} is not a known configurable"
            f"{self._nearest(reference.name)}; files are read, and nothing in them is executed"
        )

    def _elsewhere(self, selector: str) -> str:
        """Returns what to do about a user's own copy of a known configurable; "" for others."""
        short = selector.rpartition(".")[2]
        known = " or ".join(each.names[0] for each in self._known if each.short == short)
        if not known or "." not in selector:
            return ""
        of_model = ".network." in f".{selector}"
        instead = "; leave the model's files out and name it with --preset" if of_model else ""
        return f"it must be {known}, as code that files name is not run{instead}"

    def _nearest(self, selector: str) -> str:
        return nearest(selector.rpartition(".")[2], [each.short for each in self._known])

    def _key(self, binding: Binding) -> tuple[str, str, str]:
        """Returns (scope, full name, argument); raises UserError if one is unknown."""
        named = [each for each in self._known if _names(each, binding.selector)]
        if not named:
            hint = _other(binding) or self._elsewhere(binding.selector)
            raise UserError(
                f"{binding.place}: {binding.name}: the configurable {binding.selector} is unknown"
                f"{self._nearest(binding.selector) if not hint else ''}: "
                f"{hint or 'correct or remove it'}"
            )
        arguments = {name for each in named for name in each.arguments}
        if binding.argument not in arguments:
            raise UserError(
                f"{binding.place}: {named[0].short} has no argument {binding.argument}"
                f"{nearest(binding.argument, arguments)}; it has {', '.join(sorted(arguments))}"
            )
        called = next(each for each in named if binding.argument in each.arguments)
        return binding.scope, called.names[0], binding.argument

    def _binding(self, configurable: Configurable, scope: str, name: str) -> Binding | None:
        """Returns the binding for a scope: the one with the longest matching prefix."""
        parts = scope.split("/") if scope else []
        for depth in range(len(parts), -1, -1):
            key = ("/".join(parts[:depth]), configurable.names[0], name)
            if key in self._bound:
                # Overridden bindings of shorter scopes are not idle.
                keys = {("/".join(parts[:less]), *key[1:]) for less in range(depth + 1)}
                self._used |= keys
                return self._bound[key]
        return None

    def _twice(self) -> None:
        seen: dict[tuple[str, str], Binding] = {}
        for binding in self.statements.bindings:
            file = binding.place.rpartition(":")[0]
            before = seen.get((file, binding.name))
            unset = before is not None and "gin.REQUIRED" in str(before.value)
            if file and before and not unset and before.value != binding.value:
                self.warn(
                    f"{binding.name} is set twice in {file}, to {before.value!r} "
                    f"({before.place}) and {binding.value!r} ({binding.place}): the last wins"
                )
            seen[(file, binding.name)] = binding


def typed(found: Value, name: str, declared: Any) -> Any:
    """Converts a value to a field's declared type; errors name file, line and `name`."""
    try:
        return _typed(found.value, declared)
    except ValueError as error:
        raise UserError(f"{found.origin}: {name} must be {error}, not {found.value!r}") from error


def _typed(value: Any, declared: Any) -> Any:
    if declared is object:
        return value
    choices = typing.get_args(declared)
    if typing.get_origin(declared) in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _typed(value, next(kind for kind in choices if kind is not type(None)))
    if typing.get_origin(declared) is tuple:
        if not isinstance(value, list | tuple) or isinstance(value, Reference):
            raise ValueError("a list")
        return tuple(_typed(item, choices[0]) for item in value)
    if declared is float and type(value) is int:
        return float(value)
    if type(value) is not declared:
        raise ValueError(f"of type {declared.__name__}")
    return value


def _plain(value: Any) -> Any:
    """Normalizes a value for comparison: references become unqualified text, tuples lists."""
    if isinstance(value, Reference):
        return str(value._replace(name=value.name.rpartition(".")[2]))
    return list(value) if isinstance(value, tuple) else value


def _names(configurable: Configurable, selector: str) -> bool:
    """Returns whether a selector is a dotted suffix of a full name (gin's rule)."""
    return any(f".{name}".endswith(f".{selector}") for name in configurable.names)
