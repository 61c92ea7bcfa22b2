"""Values of Python as flags: what is typed for each kind of value."""

import dataclasses
import pathlib

import pytest

from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import REQUIRED, field
from tasks.terminal.toml_flags import changed, words


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = field(0.1, "rate")
    steps: int | None = field(10, "steps")


@dataclasses.dataclass(frozen=True)
class Flat:
    seed: int = field(0, "seed")
    by_code: int = 0


@dataclasses.dataclass(frozen=True)
class Named:
    named: str | None = field(None, "flag with its group's name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    place: str = field(REQUIRED, "place")
    inner: Inner = field(Inner, "inner")
    flat: Flat = field(Flat, "flat", flat=True)
    named: Named = field(Named, "named", flat=True)
    several: tuple[str, ...] = field((), "several", repeated=True)
    numbers: tuple[int, ...] = field((), "numbers")
    on: bool = field(False, "on")


class Handle:
    def __fspath__(self):
        return "folder"


@pytest.mark.parametrize(
    ("values", "typed"),
    [
        ({"place": pathlib.Path("a/b")}, ["--place=a/b"]),
        ({"place": Handle()}, ["--place=folder"]),
        ({"place": None}, []),
        ({"inner": {"rate": 1e-5, "steps": None}}, ["--inner.rate=1e-05", "--inner.steps=None"]),
        ({"inner.steps": 3}, ["--inner.steps=3"]),
        ({"inner": Inner(rate=2.0)}, ["--inner.rate=2.0"]),
        ({"flat": Flat(seed=3, by_code=2)}, ["--seed=3"]),
        ({"flat": {"seed": 3}}, ["--seed=3"]),
        ({"named": "a"}, ["--named=a"]),
        ({"named": {"named": "a"}}, ["--named=a"]),
        ({"several": ["a,b", "c"]}, ["--several=a,b", "--several=c"]),
        ({"several": "a"}, ["--several=a"]),
        ({"numbers": (1, 2)}, ["--numbers=1,2"]),
        ({"on": True}, ["--on=true"]),
        ({"unknown": 1}, ["--unknown=1"]),
    ],
)
def test_values_are_typed_as_on_a_command_line(values, typed):
    assert words(Flags, values) == typed


def test_a_dataclass_is_what_is_not_at_its_default():
    given = Flags(place="a", inner=Inner(steps=None), flat=Flat(seed=1), numbers=(4,))
    assert changed(given) == {"place": "a", "inner": {"steps": None}, "seed": 1, "numbers": (4,)}
    command = Command(Flags, lambda flags: None)
    assert command.typed(changed(given)) == given


def test_a_command_is_called_as_a_function():
    command = Command(Flags, lambda flags: 7)
    given = command.typed({"place": "a", "on": True})
    assert (command.call(given), command.call(given, lambda flags: flags.on)) == (7, True)
    with pytest.raises(UserError, match=r"^unknown flag --plaec \(did you mean --place\?\)$"):
        command.typed({"plaec": "a"})
    with pytest.raises(UserError, match=r"^--inner.steps=3 and --inner.steps=4: give one of them$"):
        command.typed({"place": "a", "inner": Inner(steps=3), "inner.steps": 4})
    with pytest.raises(UserError, match=r"^required: --place$"):
        command.typed({"place": None})

    def full(flags):
        raise OSError(28, "No space left on device", "a/b")

    with pytest.raises(UserError, match=r"^a/b: the disk is full"):
        command.call(given, full)
