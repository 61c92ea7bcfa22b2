"""Filters of a batch: the edits of all sets in order, then all verdicts, on the final texts.

A document counts for the first rule that drops it. A pair is one document; its sides are edited and
judged in turn, and drops caused by one side are counted by side.
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annexes.filtering import sets
from pipeline.annexes.filtering.edits import EDITS
from pipeline.annexes.filtering.statistics import Statistics
from tasks import registry
from tasks.cache.filtered import FILTERED, FilterRecord
from tasks.document_kind import SIDES
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table

# Kinds of counts.
JUDGED, ALONE, FIRST = "judged", "alone", "first"
# Words per pattern: RE2 cannot compile tens of thousands.
_WORDS = 1000
# Maximum characters of a reason from a user's function, and of a dropped text's excerpt.
_LONGEST_REASON, _EXCERPT = 80, 200
# Separates the sides of a pair in an excerpt, as in Moses files.
_BETWEEN = " ||| "


class Verdict(NamedTuple):
    """A rule's verdict on a batch: bool[texts] `drops`, and each text's measurement, or None."""

    rule: str
    drops: np.ndarray
    values: Sequence[Any] | np.ndarray | None = None


def verdicts_of(record: FilterRecord, columns: Mapping[str, Statistics]) -> Iterator[Verdict]:
    """Yields a set's verdicts on texts, or on sides of pairs, by column."""
    both = [columns[side] for side in sets.sides_of(record)]
    if record.name == sets.PAIRS:
        yield from _of_sides(both, record.settings)
    elif record.name == "function" and len(both) > 1:
        yield from _of_function([each.texts for each in both], record.settings)
    else:
        for side, statistics in zip(sets.sides_of(record), both, strict=True):
            for verdict in verdicts(record, statistics):
                yield verdict._replace(rule=verdict.rule + _of(side))


def _of(side: str) -> str:
    return "" if side == "text" else f" of {side}"


def verdicts(record: FilterRecord, statistics: Statistics) -> Iterator[Verdict]:
    """Yields the verdicts of a set's rules on texts, in order."""
    settings, inclusive = record.settings, sets.SETS[record.name].inclusive
    for key in sets.SETS[record.name].settings:
        threshold = settings[key]
        measure = sets.measure_of(key)
        if measure is None or threshold is None:
            continue
        if measure.setting:
            setting = settings[measure.setting]
            setting = tuple(setting) if isinstance(setting, list) else setting
            values = getattr(statistics, measure.of)(setting)
        else:
            values = statistics[measure.of]
        if measure.over:
            over = statistics[measure.over]
            values = np.divide(values, over, out=np.zeros(len(values)), where=over != 0)
        is_least = key.startswith("min_")
        drops = values < threshold if is_least else values > threshold
        yield Verdict(key, drops | (values == threshold) if inclusive else drops, values)
    if phrases := settings.get("page_phrases"):
        yield Verdict("page_phrases", statistics.with_phrase(tuple(phrases)))
    if words := settings.get("words"):
        found = np.zeros(len(statistics), bool)
        for begin in range(0, len(words), _WORDS):
            # Any of these whole words or phrases, in any case.
            choices = "|".join(map(re.escape, words[begin : begin + _WORDS]))
            border = r"[^\pL\pM\pN_]"
            pattern = rf"(?i)(?:^|{border})(?:{choices})(?:$|{border})"
            found |= _matches(statistics.texts, pattern)
        yield Verdict("words", found)
    if record.name == "regex":
        found = _matches(statistics.texts, settings["pattern"])
        yield Verdict("pattern", ~found if settings["wanted"] else found)
    if record.name == "language":
        yield from _of_languages(statistics.texts, settings)
    if record.name == "function":
        yield from _of_function([statistics.texts], settings)


def _of_sides(sides: Sequence[Statistics], settings: dict[str, Any]) -> Iterator[Verdict]:
    """Yields the verdicts of sets.PAIRS, which ignore pairs with an empty side."""
    inputs, targets = sides
    for key, of in sets.RATIOS.items():
        if settings[key] is None:
            continue
        shorter = np.minimum(inputs[of], targets[of])
        longer = np.maximum(inputs[of], targets[of])
        ratios = np.divide(longer, shorter, out=np.zeros(len(inputs)), where=shorter != 0)
        yield Verdict(key, ratios > settings[key], ratios)
    if settings["drop_identical"]:
        one, other = (pc.utf8_trim_whitespace(each.texts) for each in (inputs, targets))
        equal = pc.and_(pc.equal(one, other), pc.not_equal(one, ""))
        yield Verdict("drop_identical", equal.to_numpy(zero_copy_only=False))


def _matches(texts: pa.LargeStringArray, pattern: str) -> np.ndarray:
    return pc.match_substring_regex(texts, pattern).to_numpy(zero_copy_only=False)


def _of_languages(texts: pa.LargeStringArray, settings: dict[str, Any]) -> Iterator[Verdict]:
    from pipeline.annexes.filtering import languages

    found = languages.detected(texts)
    wanted = set(settings["languages"])
    others = [language not in wanted for language, _ in found]
    unsure = [score < settings["min_score"] for _, score in found]
    values = [f"{language} {score:.3f}" for language, score in found]
    yield Verdict("languages", np.array(others, bool), values)
    yield Verdict("min_score", np.array(unsure, bool), values)


def _of_function(
    columns: Sequence[pa.LargeStringArray], settings: dict[str, Any]
) -> Iterator[Verdict]:
    """Yields a verdict for each reason returned by a user's function of the columns."""
    module, name = settings["module"], settings["name"]
    try:
        returned = getattr(registry.load(module), name)(*columns)
        # A single text would be read as reasons of one character each.
        reasons = [returned] if isinstance(returned, str) else pa.array(returned).to_pylist()
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit is also the function's failure
        raise UserError(f"{module}.{name} failed: {type(error).__name__}: {error}") from error
    wrong = [each for each in reasons if each is not None and not isinstance(each, str)]
    texts = len(columns[0])
    if wrong or len(reasons) != texts or isinstance(returned, str):
        raise UserError(
            f"{module}.{name} must return, for each text, None or a reason to drop it: for "
            f"{texts} texts it returned {len(reasons)} values"
            + (f", such as {wrong[0]!r}" if wrong else "")
        )
    for reason in sorted({each for each in reasons if each}):
        if len(reason) > _LONGEST_REASON or "\n" in reason:
            raise UserError(
                f"{module}.{name} gives the reason {reason[:_LONGEST_REASON]!r}: each must be one "
                f"line of at most {_LONGEST_REASON} characters, and there must be few of them"
            )
        yield Verdict(reason, np.array([each == reason for each in reasons], bool))


class Filters:
    """The filters of a plan; raises a UserError for rules of other versions and changed modules.

    `tally` counts documents by (kind, reason): JUDGED, all judged; ALONE, those a rule would drop
    alone; FIRST, those it is the first to drop.
    """

    def __init__(self, records: Sequence[FilterRecord]):
        self._records = records
        self.tally: Counter[tuple[str, str]] = Counter()
        for record in records:
            _check(record)

    def __call__(
        self, batch: pa.RecordBatch, quarantine: Callable[..., None], edits: Counter[str]
    ) -> pa.RecordBatch:
        """Filters a batch; `quarantine` takes id, place, reason, value and text of a drop."""
        names = [name for name in (*SIDES, "text") if name in batch.schema.names]
        columns = {name: batch.column(name).cast(pa.large_string()) for name in names}
        usable = functools.reduce(pc.and_, (column.is_valid() for column in columns.values()))
        texts = {
            name: column.fill_null("") if column.null_count else column
            for name, column in columns.items()
        }
        every = usable.true_count == len(usable)
        for record in self._records:
            if edit := EDITS.get(record.name):
                for side in sets.sides_of(record):
                    some = texts[side] if every else texts[side].filter(usable)
                    edited, counts = edit(some, record.settings)
                    if not every:
                        edited = pc.replace_with_mask(texts[side], usable, edited)
                    texts[side] = edited
                    edits.update(
                        {f"{record.label} {what}{_of(side)}": n for what, n in counts.items() if n}
                    )
        judged = usable.to_numpy(zero_copy_only=False)
        self.tally[JUDGED, ""] += int(judged.sum())
        statistics = {name: Statistics(each) for name, each in texts.items()}
        reasons, values = self._judge(statistics, judged)
        dropped = np.flatnonzero(reasons != None)  # noqa: E711
        for row in dropped.tolist():
            quarantine(
                batch.column("id")[row].as_py(),
                batch.column("place")[row].as_py(),
                reasons[row],
                value=values[row],
                text=_BETWEEN.join(text[row].as_py()[:_EXCERPT] for text in texts.values()),
            )
        for name, each in texts.items():
            if columns[name].null_count:
                each = pc.if_else(usable, each, pa.scalar(None, each.type))
            batch = batch.set_column(batch.schema.get_field_index(name), name, each)
        if not len(dropped):
            return batch
        return batch.filter(pa.array(reasons == None))  # noqa: E711

    def _judge(
        self, columns: Mapping[str, Statistics], judged: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first reason to drop each document, or None, and its measurement."""
        reasons = np.full(len(judged), None, object)
        values = np.full(len(judged), None, object)
        for record in self._records:
            for verdict in verdicts_of(record, columns):
                drops = verdict.drops & judged
                if not drops.any():
                    continue
                reason = f"{FILTERED}{record.label} {verdict.rule}"
                new = drops & (reasons == None)  # noqa: E711
                self.tally[ALONE, reason] += int(drops.sum())
                self.tally[FIRST, reason] += int(new.sum())
                reasons[new] = reason
                if verdict.values is None:
                    continue
                for row in np.flatnonzero(new).tolist():
                    value = verdict.values[row]
                    values[row] = value if isinstance(value, str) else round(float(value), 6)
        return reasons, values


def rules_table(counts: Mapping[tuple[str, str], Any]) -> str:
    """Returns a table of how many documents each rule would drop alone, or drops first."""
    rows = [("documents judged", str(counts[JUDGED, ""]), "")]
    for kind, reason in counts:
        if kind == ALONE:
            rows.append((reason, str(counts[kind, reason]), str(counts[FIRST, reason])))
    return table(("", "would drop", "is the first to"), rows)


def _check(record: FilterRecord) -> None:
    if record.name not in sets.SETS or record.version != sets.VERSION:
        raise UserError(
            f"the cache has filters of a different version ({record.name} {record.version}, here "
            f"{sets.VERSION}): build into another folder, or with the version that began it"
        )
    if record.unicode != unicodedata.unidata_version:
        raise UserError(
            f"the cache's filters use Unicode {record.unicode}, but this Python has "
            f"{unicodedata.unidata_version}: use the Python that began it"
        )
    if record.name == "function":
        module = registry.load(record.settings["module"])
        if not module.__file__ or files.sha256(module.__file__) != record.settings["sha256"]:
            raise UserError(
                f"{module.__name__} was changed since the build began: restore it, or build into "
                "another folder"
            )
    if record.name == "language":
        from pipeline.annexes.filtering import languages

        here = languages.state(record.settings["languages"])["identifier"]
        if here != record.settings["identifier"]:
            raise UserError(
                f"the cache's languages were found by {record.settings['identifier']}, but this "
                f"machine has {here}: install the former"
            )
