"""A model's slots, and the parts that fill them by name: "rotary", or "rotary:base=500000".

A part is one row of its slot; user modules and annexes can add rows. Plain data, no JAX: a
builder's module is imported only when the part is built.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from tasks.annexes import Registry
from tasks.terminal.flag_fields import Rejected, check, kind_in_words, one_of, parse_value

__all__ = ["Part"]


def load(path: str) -> Any:
    """Imports "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def constant(path: str) -> Callable[..., Any]:
    """Returns a builder that gives the object at "module:name" for every configuration."""
    return partial(lambda path, *arguments: load(path), path)


def of_options(path: str) -> Callable[..., Any]:
    """Returns a builder that makes the class at "module:name", whose fields are the options."""
    return partial(lambda path, _, options, *arguments: load(path)(**vars(options)), path)


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """Options of a part that has none."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a model.

    Attributes:
      builder: function or "module:function" that takes a `ModelConfig`, `options` and slot
        arguments; or the result of `constant` or `of_options`.
      facts: facts for configuration, cost and exports; None means the slot's default.
      options: frozen dataclass whose fields have defaults, help and rules (`terminal.fields`).
      check: takes a `ModelConfig` and options; raises `Rejected` if they do not fit together.
    """

    builder: str | Callable[..., Any]
    facts: Any = None
    options: type = NoOptions
    check: Callable[[Any, Any], None] = lambda config, options: None

    def build(self, *arguments: Any) -> Any:
        builder = load(self.builder) if isinstance(self.builder, str) else self.builder
        return builder(*arguments)


class Choice(NamedTuple):
    """A part's name and options."""

    name: str
    options: Any

    def __str__(self) -> str:
        """Returns the shortest text that `Slot.parse` reads as this choice."""
        changed = [
            f"{field.name}={_text(getattr(self.options, field.name))}"
            for field in dataclasses.fields(self.options)
            if getattr(self.options, field.name) != field.default
        ]
        return ":".join([self.name, *[",".join(changed)] * bool(changed)])


class Slot(Registry[Part]):
    """The parts that a field of `ModelConfig` can name."""

    def __init__(self, field: str, parts: Mapping[str, Part], facts: Callable[[], Any] = NoOptions):
        """`facts` makes the default facts of a part."""
        self.field, self._facts = field, facts
        super().__init__(
            f"parts.{field}", {name: self.completed(part) for name, part in parts.items()}
        )

    def completed(self, value: Part) -> Part:
        return dataclasses.replace(value, facts=self._facts()) if value.facts is None else value

    def register(self, name: str, value: Part) -> None:
        """Adds a part for this process; raises ValueError if the name is taken or unusable."""
        if {*name} & {*":,="}:
            raise ValueError(f"{name!r}: part names cannot contain colons, commas or equals signs")
        super().register(name, value)

    def parse(self, text: str) -> Choice:
        """Parses a choice; raises `Rejected` if a part, option or value is invalid."""
        name, _, rest = text.partition(":")
        if name not in self:
            raise Rejected(self.field, text, one_of(self))
        return _parse(self.field, text, name, rest, self[name].options)


def several(slot: Slot, text: str) -> dict[str, Choice]:
    """Parses choices joined by "+", each once; returns them by name in the slot's order.

    "none" is no choice.
    """
    choices = [slot.parse(word) for word in text.split("+")]
    found = {choice.name: choice for choice in choices}
    if len(found) < len(choices):
        raise Rejected(slot.field, text, "parts joined by +, each once")
    return {name: found[name] for name in slot if name in found and name != "none"}


@cache
def _parse(slot: str, text: str, name: str, rest: str, kind: type) -> Choice:
    declared, values = _declared(kind), {}
    for setting in rest.split(",") if ":" in text else ():
        option, equals, value = setting.partition("=")
        if option not in declared or not equals:
            rule = f"{name!r} alone"
            if declared:
                listed = ", ".join(declared)
                rule = f"{name!r} with options {listed}, such as {name}:{next(iter(declared))}=…"
            raise Rejected(slot, text, rule)
        if option in values:
            rule = f"{name!r} with each option once, and {option} is there twice"
            raise Rejected(slot, text, rule)
        try:
            values[option] = parse_value(value, declared[option])
        except ValueError as error:
            rule = f"a part whose {option} is {kind_in_words(declared[option])}"
            raise Rejected(slot, text, rule) from error
        if isinstance(values[option], float) and not math.isfinite(values[option]):
            raise Rejected(slot, text, f"a part whose {option} is a finite number")
    try:
        options = kind(**values)
        check(options)
    except Rejected as error:
        option = error.field.rpartition(".")[2]
        raise Rejected(slot, text, f"a part whose {option} is {error.rule}") from error
    return Choice(name, options)


@cache
def _declared(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def add_part(model: dict[str, Any], part: Choice) -> None:
    """Adds a stack part to a model's stored fields."""
    others = model.get("stack_parts", "none")
    model["stack_parts"] = str(part) if others == "none" else f"{others}+{part}"


def reject_changed(options: Any, when: str, *names: str) -> None:
    """Rejects options that are not read but differ from their defaults; `when` says when."""
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name in names:
        if getattr(options, name) != defaults[name]:
            raise Rejected(name, getattr(options, name), f"left out {when}")


def require_of(config: Any, holds: bool, field: str, rule: str) -> None:
    """Raises `Rejected` with the value of `config`'s `field` unless `holds` is true."""
    if not holds:
        raise Rejected(field, getattr(config, field), rule)
