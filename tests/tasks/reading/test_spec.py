"""SPECs of corpora: their parts, and what is said of a bad one."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.reading import sources
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
        ("parquet:", "needs a path"),
        ("python_docs:x", "takes no path"),
        ("json:x?colunm=y", "did you mean column?"),
        ("json:x?column=", "is empty"),
        ("json:x?validation=1", "share"),
        ("json:x?validation=nan", "share"),
        ("json:x?validation=many", "share"),
        ("text:x?column=y", "has no columns"),
        ("hf:a/b/c", "not OWNER/NAME"),
        ("hf:a/b@", "empty"),
    ],
)
def test_a_bad_spec_says_what_is_wrong_and_shows_the_forms(text, says):
    with pytest.raises(UserError, match="hf:OWNER/NAME") as caught:
        sources.parse(text)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("text:a?document=page", "document=page is none of line, file, block"),
        ("json:a?document=file", "only text has ?document="),
    ],
)
def test_a_wrong_document_is_rejected(spec, words):
    with pytest.raises(UserError, match=re.escape(words)):
        sources.parse(spec)


@pytest.mark.parametrize(
    ("option", "says"),
    [("delimiter=%0A", r"delimiter='\\n' is not one ASCII"), ('delimiter="', "are the same")],
)
def test_wrong_delimiters_are_one_line(option, says):
    with pytest.raises(UserError, match=says) as caught:
        sources.parse(f"csv:a.csv?{option}")
    assert "\n" not in str(caught.value).removeprefix("corpus ")
