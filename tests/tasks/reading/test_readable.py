"""A SPEC is shown with its letters, and parses to the same."""

from tasks.reading import spec
from tasks.reading.corpus import readable


def test_letters_outside_ascii_are_decoded_and_nothing_else():
    text = str(spec.parse("json:a/*.jsonl?column=conținut %26 50%25&validation=0"))
    assert "con%C8%9Binut" in text
    shown = readable(text)
    assert "column=conținut+%26+50%25" in shown
    assert spec.parse(shown) == spec.parse(text)
