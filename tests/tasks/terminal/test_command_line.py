"""Help texts: defaults that are values, line breaks where a command asks for them."""

import argparse

import pytest

from tasks.terminal.command_line import Parser, RawHelp


def help_of(*flags, **kwargs):
    parser = Parser(prog="program")
    parser.add_argument(*flags, **kwargs)
    return " ".join(parser.format_help().split())


@pytest.mark.parametrize("default", [7, 0, 0.0, True, "text", ["a"]])
def test_help_shows_a_default_that_is_a_value(default):
    assert f"the thing (default: {default})" in help_of("--x", default=default, help="the thing")


@pytest.mark.parametrize("default", [None, False, "", [], (), argparse.SUPPRESS])
def test_help_omits_a_default_that_is_no_value(default):
    assert "(default" not in help_of("--x", default=default, help="the thing")


def test_help_states_a_default_once():
    assert help_of("--x", default=7, help="sevens (default: seven)").endswith("(default: seven)")
    assert help_of("--x", default=7, help="sevens (%(default)s)").endswith("sevens (7)")
    assert "default" not in help_of("--x", default=7, required=True, help="the thing")
    assert "default" not in help_of("--x", action="store_true", help="the thing")


def test_raw_help_keeps_line_breaks_and_shows_defaults():
    parser = Parser(prog="program", description="one\n\n    two", formatter_class=RawHelp)
    parser.add_argument("--x", default=7, help="the thing")
    text = parser.format_help()
    assert "one\n\n    two" in text
    assert "(default: 7)" in text
