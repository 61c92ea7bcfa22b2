"""Question answering, summarisation and translation as T5 formats them.

Source: Raffel et al. 2020 (arXiv:1910.10683), appendix D.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tasks.supervised.template import Row, Supervised, TextPair

_LANGUAGES = {"de": "German", "en": "English", "fr": "French", "ro": "Romanian"}


def _squad(row: Row) -> Iterator[TextPair]:
    answers = list(row["answers"]["text"])
    yield {
        "inputs": f"question: {row['question']} context: {row['context']}",
        "targets": answers[0] if answers else "",
        "answers": answers,
    }


def _answers(text: str, pair: TextPair, is_target: bool) -> Any:
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

    return Supervised(name, source, pairs, ("bleu", "chrf"))


# Differences: T5's code also puts spaces around the punctuation of SQuAD, the paper does not.
TASKS = (
    Supervised("squad", "squad", _squad, ("squad",), _answers),
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
