"""Parses a SPEC, the value of --corpus; `sources` describes its meaning."""

import contextlib
import dataclasses
import math
import re
import urllib.parse
from collections.abc import Collection
from typing import Any

from tasks import annexes
from tasks.document_kind import SIDES
from tasks.reading import columns, corpus
from tasks.reading.corpus import HUB, PYTHON_DOCS, CorpusSpec, default_spec
from tasks.reading.formats.registry import FORMATS
from tasks.terminal.command_line import UserError, nearest


def forms() -> str:
    """Describes the forms of a SPEC, for messages."""
    return (
        f"{PYTHON_DOCS}, {', '.join(f'{name}:GLOB' for name in FORMATS)} "
        f"or {HUB}:OWNER/NAME[:CONFIG][@REVISION], "
        "each with ?column=text&split=train&id=id&validation=0.01 as needed, text with "
        "?document=line, file or block, CSV with ?delimiter=;&quote=none&columns=a,b; pairs are "
        "read with ?inputs=COLUMN&targets=COLUMN, or "
        "templates such as ?inputs={premise} </s> {hypothesis}"
    )


def _short_forms() -> str:
    """Describes the forms in an error; help shows them in full."""
    kinds = ", ".join(FORMATS)
    return f"a corpus is {PYTHON_DOCS}, {HUB}:OWNER/NAME or KIND:GLOB with a kind of {kinds}"


def parse(text: str) -> CorpusSpec:
    """Parses a SPEC; if it is invalid, raises a UserError that says why."""
    head, _, query = text.partition("?")
    kind, _, location = head.partition(":")
    kinds = (PYTHON_DOCS, *FORMATS, HUB)
    if kind not in kinds:
        if hint := _meant(head) or nearest(kind, kinds):
            raise _invalid(text, f"unknown kind {kind!r}{hint}")
        if not location:
            raise _invalid(text, f"it needs a kind, such as text:{head}; {_short_forms()}")
        raise _invalid(text, f"unknown kind {kind!r}; {_short_forms()}")
    if bool(location) == (kind == PYTHON_DOCS):
        reason = f"{kind} takes no path" if location else f"{kind}: needs a path after it"
        raise _invalid(text, f"{reason}; {_short_forms()}")
    config = revision = ""
    if kind == HUB:
        location, config, revision = _data_set(text, location)
    options = _options(text, query, default_spec(kind).quote)
    own = _options_of(kind)
    refused = [name for name in options if name in corpus.FORMAT_OPTIONS and name not in own]
    if set(refused) & set(corpus.COLUMN_OPTIONS):
        raise _invalid(text, f"{kind} has no columns")
    _check_pairs(text, options)
    for name in refused:
        having = [other for other in kinds if name in _options_of(other)]
        have = "has" if len(having) == 1 else "have"
        raise _invalid(text, f"only {', '.join(having)} {have} ?{name}=")
    return dataclasses.replace(
        default_spec(kind), location=location, config=config, revision=revision, **options
    )


def _options_of(kind: str) -> Collection[str]:
    if kind == HUB:  # the listing decides which of them apply
        return [name for name in corpus.FORMAT_OPTIONS if name != "document"]
    return () if kind == PYTHON_DOCS else FORMATS[kind].options


# Kind -> the suffixes of files that it reads; annexes add theirs.
_ENDINGS = {
    "parquet": r"\.parquet",
    "json": r"\.jsonl?(\.\w+)?",
    "text": r"\.(txt|text)(\.\w+)?",
    **annexes.entries("file_endings"),
}


def _meant(head: str) -> str:
    """Returns " (did you mean X?)" for a Hub address or a path without its kind, or ""."""
    address = re.match(r"https?://huggingface\.co/datasets/([\w.-]+/[\w.-]+)", head)
    if address:
        return f" (did you mean {HUB}:{address[1]}?)"
    kind, _, location = head.rpartition(":")
    for meant, ending in _ENDINGS.items():
        if re.search(f"{ending}$", location) and kind not in (PYTHON_DOCS, HUB, *FORMATS):
            return f" (did you mean {meant}:{location}?)"
    return ""


def _data_set(text: str, location: str) -> tuple[str, str, str]:
    if meant := _meant(location):
        raise _invalid(text, f"a web address is not a name{meant}")
    location, at, revision = location.partition("@")
    location, colon, config = location.partition(":")
    if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", location):
        raise _invalid(text, f"{location!r} is not OWNER/NAME: write hf:OWNER/NAME")
    if (at and not revision) or (colon and not config):
        raise _invalid(text, "a revision or configuration is empty")
    return location, config, revision


def _options(text: str, query: str, quote: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        if name not in corpus.OPTIONS:
            raise _invalid(text, f"unknown option {name!r}{nearest(name, corpus.OPTIONS)}")
        if not value:
            raise _invalid(text, f"option {name!r} is empty")
        if name in options:
            raise _invalid(text, f"option {name!r} is given twice")
        options[name] = value
    _check_dialect(text, options, quote)
    document = options.get("document", corpus.LINE)
    if document not in corpus.DOCUMENTS:
        raise _invalid(text, f"document must be {' or '.join(corpus.DOCUMENTS)}, not {document}")
    if "validation" in options:
        share = math.nan
        with contextlib.suppress(ValueError):
            share = options["validation"] = float(options["validation"])
        if not 0 <= share < 1:
            raise _invalid(text, "validation must be at least 0 and less than 1")
    return options


def _check_dialect(text: str, options: dict[str, Any], quote: str) -> None:
    """Checks CSV and TSV options, and turns `tab` into the character; `quote` is the default."""
    if options.get("delimiter") in ("tab", r"\t"):
        options["delimiter"] = "\t"
    for name in ("delimiter", "quote"):
        value = options.get(name, ",")
        known = name == "quote" and value == corpus.NO_QUOTE
        if not known and (len(value) != 1 or not value.isascii() or value in "\r\n"):
            words = ", or none" if name == "quote" else ", or tab"
            raise _invalid(text, f"{name} must be one ASCII character{words}, not {value!r}")
    if options.get("delimiter", ",") == options.get("quote", quote):
        raise _invalid(text, "delimiter and quote are the same")
    names = options.get("columns", "x").split(",")
    if len(set(names)) < len(names) or not all(names):
        raise _invalid(text, f"columns={options['columns']} has an empty or repeated name")


def _check_pairs(text: str, options: dict[str, Any]) -> None:
    sides = [side for side in SIDES if side in options]
    for other in SIDES:
        if sides and other not in sides:
            raise _invalid(text, f"pairs need {other} as well as {sides[0]}: add &{other}=COLUMN")
    if sides and "column" in options:
        raise _invalid(text, "a pair has inputs and targets, not column: leave column out")
    for side in sides:
        try:
            columns.parse(options[side])
        except ValueError as error:
            raise _invalid(text, f"{side}={options[side]}: {error}") from error


def _invalid(text: str, reason: str) -> UserError:
    return UserError(f"corpus {text!r}: {reason}")
