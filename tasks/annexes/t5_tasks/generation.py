"""Question answering, summarisation and translation in T5's format.

Source: Raffel et al. 2020 (arXiv:1910.10683), appendix D; T5, `preprocessors.squad`, `summarize`
and `translate`.
"""

import re
import string
from collections.abc import Iterator
from typing import Any

from tasks.annexes.t5_tasks.template import Row, Supervised, TextPair

_LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}
_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
_SPACES = re.compile(r"[\t\n\f\r ]+")


def _spaced(text: str) -> str:
    """Puts one space on each side of punctuation, and between words."""
    return _SPACES.sub(" ", _PUNCTUATION.sub(r" \1 ", text))


def _squad(row: Row) -> Iterator[TextPair]:
    correct = [_spaced(answer) for answer in row["answers"]["text"]]
    question, context = _spaced(row["question"]), _spaced(row["context"])
    inputs = _SPACES.sub(" ", f"question: {question} context: {context}")
    yield {"inputs": inputs, "targets": correct[0] if correct else "", "answers": correct}


def answers(text: str, pair: TextPair, is_target: bool) -> Any:
    """Returns a predicted text, or a pair's correct answers."""
    return pair.get("answers", [text]) if is_target else text


def summarization(name: str, source: str, text: str, summary: str) -> Supervised:
    """Returns the task of summarising the column `text` as the column `summary`."""

    def pairs(row: Row) -> Iterator[TextPair]:
        yield {"inputs": f"summarize: {row[text]}", "targets": row[summary]}

    return Supervised(name, source, pairs, ("rouge",))


def translation(name: str, source: str, before: str, after: str) -> Supervised:
    """Returns the task of translating rows {"translation": {CODE: text}} between two languages."""
    languages = f"{_LANGUAGES[before]} to {_LANGUAGES[after]}"

    def pairs(row: Row) -> Iterator[TextPair]:
        texts = row["translation"]
        yield {"inputs": f"translate {languages}: {texts[before]}", "targets": texts[after]}

    return Supervised(name, source, pairs, ("bleu_intl", "chrf"))


TASKS = (
    Supervised("squad", "squad", _squad, ("squad",), answers),
    summarization("cnn_dailymail", "cnn_dailymail/3.0.0", "article", "highlights"),
    summarization("xsum", "xsum", "document", "summary"),
    *(
        translation(f"{source}_{before}{after}", f"{source}/{pair}", before, after)
        for source, pair, languages in (
            ("wmt14", "de-en", "de"), ("wmt14", "fr-en", "fr"), ("wmt16", "ro-en", "ro"),
        )
        for before, after in (("en", languages), (languages, "en"))
    ),
)  # fmt: skip
