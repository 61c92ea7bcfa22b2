"""SPECs of corpora: their parts, and what is said of a bad one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reading import sources
from tasks.reading.corpus import readable
from tasks.terminal.command_line import UserError

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="?\x00"), min_size=1, max_size=12)
OPTIONS = {
    "split": st.text(min_size=1, max_size=9),
    "validation": st.floats(0, 1, exclude_max=True),
}


@given(
    kind=st.sampled_from(["parquet", "json"]),
    location=NAMES,
    options=st.fixed_dictionaries(
        {}, optional={**OPTIONS, "column": NAMES, "id": NAMES}
    ),
)  # fmt: skip
def test_a_spec_survives_a_round_trip(kind, location, options):
    spec = sources.CorpusSpec(kind, location, **options)
    assert sources.parse(str(spec)) == spec


def test_a_spec_of_the_hub_names_its_parts():
    spec = sources.parse("hf:owner/name:config@refs/convert/parquet?column=body")
    assert (spec.location, spec.config) == ("owner/name", "config")
    assert (spec.revision, spec.column) == ("refs/convert/parquet", "body")
    assert sources.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parket:x", "did you mean parquet?"),
        ("jsonl:/a/b.jsonl.gz?column=code", "did you mean json:/a/b.jsonl.gz?"),
        ("my books", "it needs a kind, such as text:my books; a corpus is python_docs, hf:OWNER/"),
        ("xyzzy:a", "unknown kind 'xyzzy'; a corpus is python_docs"),
        ("parquet:", "needs a path"),
        ("python_docs:x", "takes no path"),
        ("json:x?colunm=y", "did you mean column?"),
        ("json:x?column=", "is empty"),
        ("text:x?document=line&document=file", "option 'document' is given twice"),
        ("text:x?validation=0.5&validation=0.5", "option 'validation' is given twice"),
        ("json:x?validation=1", "validation must be at least 0"),
        ("json:x?validation=nan", "validation must be at least 0"),
        ("json:x?validation=many", "validation must be at least 0"),
        ("text:x?column=y", "has no columns"),
        ("hf:a/b/c", "not OWNER/NAME"),
        ("hf:a/b@", "empty"),
    ],
)
def test_a_bad_spec_says_what_is_wrong(text, says):
    with pytest.raises(UserError) as caught:
        sources.parse(text)
    assert says in str(caught.value)
    # The forms do not help with an option, or beside a better answer.
    is_about_a_form = "kind" in says or says in ("needs a path", "takes no path")
    assert ("a corpus is python_docs" in str(caught.value)) == is_about_a_form
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("text:a?document=page", "document must be line or file or block, not page"),
        ("json:a?document=file", "only text has ?document="),
        ("json:x?inputs=q", "pairs need targets as well as inputs: add &targets=COLUMN"),
        ("json:x?targets=a", "pairs need inputs as well as targets"),
        ("json:x?inputs=q&targets=a&column=x", "leave column out"),
        ("json:x?inputs={q&targets=a", "inputs={q: expected '}'"),
        ("json:x?inputs={}&targets=a", "{} names no column"),
        ("json:x?inputs={{q}}&targets=a", "a template must name a {column}"),
        ("json:x?inputs={q:>3}&targets=a", "which templates cannot have"),
    ],
)
def test_a_wrong_option_is_one_line(text, says):
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        sources.parse(text)
    assert "\n" not in str(caught.value)


def test_letters_outside_ascii_are_shown_and_nothing_else():
    text = str(sources.parse("json:a/*.jsonl?column=conținut %26 50%25&validation=0"))
    assert "con%C8%9Binut" in text
    assert "column=conținut+%26+50%25" in readable(text)
    assert sources.parse(readable(text)) == sources.parse(text)
