"""Named sets of rules: thresholds, sources, and their parsing from flags.

A setting named "min_…" or "max_…" whose measure is in MEASURES is a separate rule: it drops texts
below or above the threshold; None turns it off. Other settings are parameters, edits, or
different kinds of rules; see `stages`.

For a corpus of pairs, each record's setting "side" names the side that its set applies to.
"""

import re
import tomllib
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annexes.filtering import kernels
from tasks import registry
from tasks.cache.filtered import FilterRecord
from tasks.document_kind import SIDES, DocumentKind
from tasks.storage import files
from tasks.terminal.command_line import UserError, nearest

# Part of every filter record in a plan; increased when a rule's verdict on any text changes.
VERSION = 1

# The value of "side" for both sides of a pair, and the set that compares them.
BOTH, PAIRS = "both", "pairs"


class Measure(NamedTuple):
    """A statistic `of`, divided by the statistic `over` if given (0 where `over` is 0)."""

    of: str
    over: str = ""
    setting: str = ""


# What a rule measures, by its name without "min_" or "max_".
MEASURES = {
    **{
        name: Measure(name, over)
        for over, names in {
            "": ("characters", "words", "sentences", "lines", "braces", "longest_line"),
            "words": ("hashes", "ellipses", "alphabetic_words"),
            "lines": ("ellipsis_lines", "punctuated_lines", "duplicate_lines"),
            "line_characters": ("duplicate_line_characters", "duplicate_paragraph_characters"),
            "word_characters": (
                *(f"top_{n}" for n in kernels.TOP),
                *(f"repeated_{n}" for n in kernels.REPEATED),
            ),
            "characters": ("letters", "digits", "punctuation", "spaces", "controls"),
            "letters": ("uppercase",),
        }.items()
        for name in names
    },
    "mean_word": Measure("word_characters", "words"),
    "mean_line": Measure("line_characters", "lines"),
    "stop_words": Measure("stop_words", setting="stop_words"),
    "bullet_lines": Measure("bullet_lines", "lines", "bullets"),
    "short_lines": Measure("short_lines", "lines", "short_line_characters"),
    "duplicate_paragraphs": Measure("duplicate_paragraphs", "paragraph_count"),
    "script_letters": Measure("script_letters", "letters", "scripts"),
}

# Rules of PAIRS: ratio of the larger to the smaller side's statistic.
RATIOS = {"max_character_ratio": "characters", "max_word_ratio": "words"}


class RuleSet(NamedTuple):
    """A named set."""

    source: str  # publication, or "" for our own
    settings: Mapping[str, Any]  # default settings, in the order of judging; tuples hold texts
    needs: tuple[str, ...] = ()  # settings without which the set does nothing
    inclusive: bool = False  # whether a text exactly at the threshold is dropped


_RAE = "Rae et al. 2021, arXiv:2112.11446, "
_QUALITY = {
    "min_words": 50,
    "max_words": 100_000,
    "min_mean_word": 3,
    "max_mean_word": 10,
    "max_hashes": 0.1,
    "max_ellipses": 0.1,
    "max_bullet_lines": 0.9,
    "max_ellipsis_lines": 0.3,
    "min_alphabetic_words": 0.8,
    "min_stop_words": 2,
    # The paper lists no bullets; these are from datatrove's gopher_quality_filter.py.
    "bullets": "•-",
    "stop_words": ("the", "be", "to", "of", "and", "that", "have", "with"),
}
_REPETITION = {
    "max_duplicate_lines": 0.3,
    "max_duplicate_paragraphs": 0.3,
    "max_duplicate_line_characters": 0.2,
    "max_duplicate_paragraph_characters": 0.2,
    **{f"max_top_{n}": share for n, share in zip(kernels.TOP, (0.2, 0.18, 0.16), strict=True)},
    **{
        f"max_repeated_{n}": share
        for n, share in zip(kernels.REPEATED, (0.15, 0.14, 0.13, 0.12, 0.11, 0.1), strict=True)
    },
}
_GOPHER = RuleSet(_RAE + "appendix A.1.1 and table A1", {**_QUALITY, **_REPETITION})


SETS = {
    "gopher": _GOPHER,
    "massivetext": _GOPHER,  # Gopher's data
    "gopher_quality": RuleSet(_RAE + "appendix A.1.1", _QUALITY),
    "gopher_repetition": RuleSet(_RAE + "table A1", _REPETITION),
    "c4": RuleSet(
        "Raffel et al. 2020, arXiv:1910.10683, section 2.2; for its phrases, for long words and "
        "for ellipses also tensorflow/datasets text/c4_utils.py",
        {
            "remove_citations": True,
            "end_marks": '.!?"”',
            "min_line_words": 5,
            "max_word_characters": 1000,
            "line_phrases": (
                *("javascript", "terms of use", "privacy policy", "cookie policy"),
                *("uses cookies", "use of cookies", "use cookies"),
            ),
            "min_sentences": 3,
            "max_braces": 0,
            "page_phrases": ("lorem ipsum",),
            "words": (),
        },
    ),
    "fineweb": RuleSet(
        "Penedo et al. 2024, arXiv:2406.17557, section 3.6",
        {
            "min_punctuated_lines": 0.12,
            "max_duplicate_line_characters": 0.1,
            "max_short_lines": 0.67,
            "short_line_characters": 30,
        },
        inclusive=True,
    ),
    "length": RuleSet(
        "",
        dict.fromkeys(
            f"{bound}_{of}"
            for of in ("characters", "words", "sentences", "lines", "mean_word")
            for bound in ("min", "max")
        ),
    ),
    "characters": RuleSet(
        "",
        dict.fromkeys(
            (
                *("min_letters", "max_digits", "max_uppercase", "max_punctuation", "max_spaces"),
                *(
                    "max_controls",
                    "max_braces",
                    "max_hashes",
                    "max_ellipses",
                    "min_alphabetic_words",
                ),
            )
        ),
    ),
    "lines": RuleSet(
        "",
        {
            **dict.fromkeys(
                (
                    *("min_mean_line", "max_mean_line", "max_longest_line", "max_short_lines"),
                    *("max_bullet_lines", "max_ellipsis_lines"),
                )
            ),
            "short_line_characters": 30,
            "bullets": "•-",
        },
    ),
    "punctuation": RuleSet("", dict.fromkeys(("min_punctuated_lines", "max_punctuation"))),
    "repetition": RuleSet("", dict.fromkeys(_REPETITION)),
    "stop_words": RuleSet("", {"min_stop_words": 2, "stop_words": ()}, ("stop_words",)),
    "script": RuleSet("", {"min_script_letters": 0.5, "scripts": ()}, ("scripts",)),
    # FineWeb's score for English, section 3.1.
    "language": RuleSet("", {"languages": (), "min_score": 0.65}, ("languages",)),
    "words": RuleSet("", {"words": ()}, ("words",)),
    PAIRS: RuleSet("", {**dict.fromkeys(RATIOS), "drop_identical": True}),
    "regex": RuleSet("", {"pattern": "", "wanted": False}, ("pattern",)),
    # 192.0.2.1 (RFC 5737) and example.com (RFC 2606) are reserved for documentation.
    "pii": RuleSet("", {"emails": "email@example.com", "ips": "192.0.2.1"}),
    "replace": RuleSet("", {"pattern": "", "replacement": ""}, ("pattern",)),
    "function": RuleSet("", {"name": ""}, ("name",)),
}
# Sets that do something without a rule from MEASURES.
_ACTIVE = ("c4", "function", "language", "pii", "regex", "replace", "words")
_IS_RULE = re.compile("(min|max)_(.+)")


def measure_of(setting: str) -> Measure | None:
    """Returns what a rule measures, or None for other settings."""
    found = _IS_RULE.fullmatch(setting)
    return MEASURES.get(found[2]) if found else None


def _is_rule(setting: str) -> bool:
    return setting in RATIOS or measure_of(setting) is not None


def resolve(
    given: Sequence[str], module: str | None, unit: DocumentKind = DocumentKind.TEXT
) -> tuple[FilterRecord, ...] | None:
    """Returns the plan records for the values of --filter; None if there are none.

    A value has set names separated by commas, a set with settings as NAME?SETTING=VALUE&…, or a
    TOML file whose [[filter]] tables have a set and settings. `module` has the user's functions.
    """
    records: list[FilterRecord] = []
    for text in given:
        try:
            records += [_record(*each, module, unit) for each in _parsed(text)]
        except ValueError as error:
            raise UserError(f"--filter={text}: {error}") from error
    called = [(record.label, side) for record in records for side in sides_of(record)]
    for label, side in called:
        if called.count((label, side)) > 1:
            raise UserError(
                f"--filter: two sets are called {label}; label one of them with {label}?label=NAME"
            )
    return tuple(records) or None


def sides_of(record: FilterRecord) -> tuple[str, ...]:
    """Returns the batch columns that a set applies to."""
    side = record.settings.get("side")
    if side is None:
        return ("text",)
    return SIDES if side == BOTH else (side,)


# The functions below raise a ValueError for a mistake; `resolve` adds the flag to its text.
def _parsed(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the (name, settings) in a value of --filter."""
    if text.endswith(".toml"):
        return _of_file(text)
    names, mark, rest = text.partition("?")
    if not text.strip(" ,"):
        raise UserError("--filter is empty: name sets, or leave it out")
    if not mark:
        return [(name.strip(), {}) for name in names.split(",") if name.strip()]
    if "," in names:
        raise ValueError("settings belong to one set: repeat --filter for others")
    settings = {}
    for pair in rest.split("&"):
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"{pair} is not SETTING=VALUE")
        if key in settings:
            raise ValueError(f"{key} is given twice")
        settings[key] = re.sub("%(26|25)", lambda code: chr(int(code[1], 16)), value)
    return [(names, settings)]


def _of_file(path: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        value = tomllib.loads(files.read_bytes(path).decode())
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except IsADirectoryError as error:
        raise ValueError("it is a folder: name a file in it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not TOML: {error}") from error
    tables = value.get("filter")
    if value.keys() != {"filter"} or not isinstance(tables, list) or not tables:
        raise ValueError("it must have tables [[filter]] and nothing else")
    if not all(isinstance(table, dict) and isinstance(table.get("set"), str) for table in tables):
        raise ValueError('each [[filter]] needs a set, such as set = "gopher"')
    return [(table["set"], {key: table[key] for key in table if key != "set"}) for table in tables]


def _record(
    name: str, given: dict[str, Any], module: str | None, unit: DocumentKind
) -> FilterRecord:
    if name not in SETS:
        known = ", ".join(sorted(SETS))
        raise ValueError(f"there is no set {name}{nearest(name, SETS)}; known: {known}")
    rules = SETS[name]
    settings = dict(rules.settings)
    side = _side(name, given.pop("side", None), unit)
    label = given.pop("label", name)
    if not isinstance(label, str) or not re.fullmatch(r"[\w.-]{1,40}", label):
        raise ValueError(f"label must be letters, digits, _, - and ., not {label}")
    for key, value in given.items():
        if key not in settings:
            hint = nearest(key, settings)
            raise ValueError(f"{name} has no setting {key}{hint}; it has {', '.join(settings)}")
        try:
            settings[key] = _value(key, value, settings[key])
        except (ValueError, TypeError) as error:
            raise ValueError(f"{key}={value}: {error}") from error
    for key in settings:  # a rule of an empty list, such as stop_words=none, is off
        measure = measure_of(key)
        if measure and measure.setting and settings[measure.setting] == ():
            settings[key] = None
    if missing := [key for key in rules.needs if not settings[key]]:
        raise ValueError(f"{name} needs {missing[0]}, such as {name}?{missing[0]}=…")
    active = name in _ACTIVE or settings.get("drop_identical")
    if not active and all(settings[key] is None for key in settings if _is_rule(key)):
        rule = next(key for key in settings if _is_rule(key))
        raise ValueError(f"{name} drops nothing: give a rule, such as {name}?{rule}=…")
    _check(name, settings)
    if name == "function":
        settings |= _function_state(settings["name"], module)
    if name == "language":
        from pipeline.annexes.filtering import languages

        settings |= languages.state(settings["languages"])
    kept = {
        key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()
    }
    if side:
        kept["side"] = side
    return FilterRecord(name, label, VERSION, unicodedata.unidata_version, kept)


def _side(name: str, given: Any, unit: DocumentKind) -> str:
    if unit is DocumentKind.TEXT:
        if name == PAIRS or given is not None:
            what = f"{name} compares the sides of pairs" if name == PAIRS else "side is for pairs"
            raise ValueError(f"{what}, but the corpus has texts")
        return ""
    if given not in (None, BOTH, *SIDES) or (name == PAIRS and given not in (None, BOTH)):
        known = BOTH if name == PAIRS else f"{', '.join(SIDES)} or {BOTH}"
        raise ValueError(f"side must be {known}, not {given}")
    return given or BOTH


def _value(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, tuple):
        return () if value in ("none", "None") else _texts(value)
    if isinstance(default, bool):
        if value not in ("true", "false", True, False):
            raise ValueError("it must be true or false")
        return value in ("true", True)
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ValueError("it must be text")
        return "" if value in ("none", "None") else value
    if value in ("none", "None") and _is_rule(key):
        return None
    if isinstance(value, bool):
        raise ValueError("it must be a number")
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("it must be a number") from None
    if not 0 <= number < float("inf"):
        raise ValueError("it must be 0 or more")
    if isinstance(default, int) and not _is_rule(key) and number % 1:
        raise ValueError("it must be a whole number")
    return int(number) if number % 1 == 0 else number


def _texts(value: Any) -> tuple[str, ...]:
    """Returns texts from a TOML list, "a,b", or "@FILE" with one per line."""
    if isinstance(value, str) and value.startswith("@"):
        try:
            value = list(files.read_lines(value[1:]))
        except FileNotFoundError as error:
            raise ValueError("there is no such file") from error
    elif isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("it must be a text or a list of texts")
    return tuple(dict.fromkeys(each.strip() for each in value if each.strip()))


def _check(name: str, settings: dict[str, Any]) -> None:
    if unknown := [each for each in settings.get("scripts", ()) if each not in kernels.scripts()]:
        close = nearest(unknown[0], kernels.scripts())
        raise ValueError(f"there is no script {unknown[0]}{close}")
    words = {word for text in settings.get("stop_words", ()) for word in text.lower().split()}
    if len(words) > kernels.MOST_STOP_WORDS:
        raise ValueError(f"stop_words may have {kernels.MOST_STOP_WORDS} words at most")
    for key in RATIOS:
        if (ratio := settings.get(key)) is not None and ratio < 1:
            raise ValueError(f"{key} must be 1 or more, not {ratio}")
    if name == "pii" and not (settings["emails"] or settings["ips"]):
        raise ValueError("pii masks nothing")
    if settings.get("min_score", 0) > 1:
        raise ValueError("min_score must be from 0 to 1, like a probability")
    if name in ("regex", "replace"):
        nothing, pattern = pa.array([""]), settings["pattern"]
        try:
            pc.match_substring_regex(nothing, pattern)
            pc.replace_substring_regex(nothing, pattern, settings.get("replacement", ""))
        except pa.ArrowInvalid as error:
            raise ValueError(f"pattern: {error} (its syntax is RE2's)") from error


def _function_state(name: str, module: str | None) -> dict[str, str]:
    """Returns the module of a user's function, and its checksum."""
    if not module:
        raise ValueError(f"it needs --task_module, the module that defines {name}")
    loaded = registry.load(module)
    if not callable(getattr(loaded, name, None)):
        known = [each for each in vars(loaded) if callable(getattr(loaded, each))]
        raise ValueError(f"{module} has no function {name}{nearest(name, known)}")
    if not loaded.__file__:
        raise ValueError(f"{module} is not a file, so a plan cannot name its content")
    return {"module": module, "sha256": files.sha256(loaded.__file__)}
