"""Tables of text."""

from tasks.terminal.table import table

ROWS = [["copy", 7, "+0.5"], ["a longer name", 1234, "-"]]


def test_numbers_are_flush_right_and_words_flush_left():
    lines = table(["name", "count", "change"], ROWS).splitlines()
    assert lines == [
        "name           count  change",
        "copy               7    +0.5",
        "a longer name   1234       -",
    ]


def test_markdown_has_bars_and_a_rule_that_says_the_same():
    lines = table(["name", "count", "change"], ROWS, markdown=True).splitlines()
    assert lines[0] == "| name          | count | change |"
    assert lines[1] == "|---------------|------:|-------:|"
    assert lines[3] == "| a longer name |  1234 |      - |"
