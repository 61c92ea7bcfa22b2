"""Flags made from a dataclass: names, types, defaults, choices and aliases are the fields'."""

import dataclasses
from typing import Annotated

import pytest
from tasks.terminal.dataclass_flags import add_flags

from tasks.terminal.command_line import Parser, positive
from tasks.terminal.fields import REQUIRED, field


@dataclasses.dataclass(frozen=True)
class Options:
    name: str = field(REQUIRED, "words of name")
    price: float | None = field(None, "words of price")
    workers: Annotated[int, positive] = field(1, "words of workers", aliases=("jobs",))
    kind: str = field("a", "words of kind", choices=("a", "b"))
    loud: bool = field(False, "words of loud")
    corpus: tuple[str, ...] = field((), "words of corpus")


def parse(*flags: str) -> Options:
    parser = Parser(prog="test")
    add_flags(parser, Options)
    return Options(**vars(parser.parse_args(flags)))


def test_values_and_defaults():
    assert parse("--name=x") == Options("x")
    flags = ["--name=x", "--price=1.5", "--jobs=3", "--kind=b", "--loud"]
    assert parse(*flags) == Options("x", 1.5, 3, "b", True)
    assert parse("--name=x", "--corpus=a", "--corpus=b").corpus == ("a", "b")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--name"),
        (["--name=x", "--workers=0"], "0 is not a positive number"),
        (["--name=x", "--kind=c"], "invalid choice: 'c'"),
        (["--name=x", "--price=much"], "invalid float value"),
    ],
)
def test_rejected_values(flags, message, capsys):
    with pytest.raises(SystemExit):
        parse(*flags)
    assert message in capsys.readouterr().err


def test_help_has_the_words(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    out = capsys.readouterr().out
    assert all(f"words of {each.name}" in out for each in dataclasses.fields(Options))
