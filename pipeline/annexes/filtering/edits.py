"""Edits of texts: removing lines as C4 does, masking personal data, replacing patterns."""

import ipaddress
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.annexes.filtering.statistics import Statistics

Texts: TypeAlias = pa.LargeStringArray
Edited = tuple[Texts, Counter[str]]
Edit = Callable[[Texts, dict[str, Any]], Edited]

# Source: tensorflow/datasets text/c4_utils.py, _CITATION_REGEX.
_CITATION = r"\[[0-9]*\]|\[edit\]|\[citation needed\]"
# RFC 5322 dot-atoms without rarer characters, and a host of at least two labels.
_EMAIL = "[A-Za-z0-9._%+-]+@(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?[.])+[A-Za-z]{2,}"
_NEAR_IP = "[0-9][.][0-9]{1,3}[.][0-9]"
_IP = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?!\w|\.[0-9])", re.ASCII)


def _chosen(
    texts: Texts, holds: pa.BooleanArray, change: Callable[[Texts], tuple[Texts, int]]
) -> tuple[Texts, int]:
    """Applies `change` to the texts that `holds` selects; returns all texts and its count."""
    if not pc.any(holds).as_py():
        return texts, 0
    changed, count = change(texts.filter(holds))
    return pc.replace_with_mask(texts, holds, changed), count


def _substituted(texts: Texts, pattern: str, replacement: str) -> tuple[Texts, int]:
    count = pc.sum(pc.count_substring_regex(texts, pattern)).as_py() or 0
    return pc.replace_substring_regex(texts, pattern, replacement), count


def c4(texts: Texts, settings: dict[str, Any]) -> Edited:
    """Removes citation marks, then lines that are too short or do not end like a sentence.

    Lines with an overlong word or a listed phrase go as well. Others lose trailing white space.
    """
    counts: Counter[str] = Counter()
    if settings["remove_citations"]:
        texts, counts["citation marks"] = _chosen(
            texts, pc.match_substring(texts, "["), lambda some: _substituted(some, _CITATION, "")
        )
    statistics = Statistics(texts)
    kept = statistics.kept_lines(
        settings["end_marks"],
        settings["min_line_words"],
        settings["max_word_characters"],
        tuple(settings["line_phrases"]),
    )
    counts["lines"] = int((~kept).sum())
    return statistics.with_lines(kept), counts


def pii(texts: Texts, settings: dict[str, Any]) -> Edited:
    """Masks e-mail addresses and public, but not private, IPv4 addresses."""
    counts: Counter[str] = Counter()
    if settings["emails"]:
        replacement = settings["emails"].replace("\\", "\\\\")
        texts, counts["e-mail addresses"] = _chosen(
            texts,
            pc.match_substring(texts, "@"),
            lambda some: _substituted(some, _EMAIL, replacement),
        )
    if settings["ips"]:
        texts, counts["IP addresses"] = _chosen(
            texts,
            pc.match_substring_regex(texts, _NEAR_IP),
            lambda some: _without_ips(some, settings["ips"]),
        )
    return texts, counts


def _without_ips(texts: Texts, mask: str) -> tuple[Texts, int]:
    count = 0

    def masked(found: re.Match[str]) -> str:
        nonlocal count
        try:
            is_public = ipaddress.IPv4Address(found[0]).is_global
        except ValueError:  # a number above 255 or with a leading 0
            return found[0]
        count += is_public
        return mask if is_public else found[0]

    return pa.array([_IP.sub(masked, text) for text in texts.to_pylist()], texts.type), count


def replace(texts: Texts, settings: dict[str, Any]) -> Edited:
    """Replaces an RE2 pattern; \\1 in the replacement is the first group."""
    pattern, replacement = settings["pattern"], settings["replacement"]
    changed = pc.replace_substring_regex(texts, pattern, replacement)
    count = pc.sum(pc.not_equal(texts, changed)).as_py() or 0
    return changed, Counter({"texts changed": count})


EDITS: dict[str, Edit] = {"c4": c4, "pii": pii, "replace": replace}
