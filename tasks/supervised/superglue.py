"""SuperGLUE as T5 formats it.

Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.4 and appendix D; Wang et al. 2019
(arXiv:1905.00537) for the metrics of each task.
Differences: the paper's WiC also names the part of speech, which the rows on the Hub lack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tasks.supervised.template import UNKNOWN, Row, Supervised, TextPair, classification, joined

_FALSE_TRUE = ("False", "True")


def _copa(row: Row) -> Iterator[TextPair]:
    keys = ("choice1", "choice2", "premise", "question")
    label = int(row["label"])
    target = f"choice{label + 1}" if label >= 0 else UNKNOWN
    yield {"inputs": joined("copa", row, keys), "targets": target}


def _multirc(row: Row) -> Iterator[TextPair]:
    label = int(row["label"])
    index = row["idx"]
    yield {
        "inputs": joined("multirc", row, ("question", "answer", "paragraph")),
        "targets": _FALSE_TRUE[label] if label >= 0 else UNKNOWN,
        "group": f"{index['paragraph']}-{index['question']}",
    }


def _multirc_judged(text: str, pair: TextPair, _is_target: bool) -> Any:
    value = _FALSE_TRUE.index(text) if text in _FALSE_TRUE else -1
    return {"group": pair["group"], "value": value}


def _record(row: Row) -> Iterator[TextPair]:
    """Yields one example for each right answer; without one, for the row."""
    passage = re.sub(r"(\.|\?|\!|\"|\')\n@highlight\n", r"\1 ", row["passage"])
    passage = re.sub(r"\n@highlight\n", ". ", passage)
    entities = ", ".join(row["entities"])
    inputs = f"record query: {row['query']} entities: {entities} passage: {passage}"
    answers = list(row["answers"])
    for answer in dict.fromkeys(answers) or [UNKNOWN]:
        yield {"inputs": inputs, "targets": answer, "answers": answers}


def _answers(text: str, pair: TextPair, is_target: bool) -> Any:
    return pair["answers"] if is_target else text


def _wsc(row: Row) -> Iterator[TextPair]:
    """Yields a text whose pronoun is marked, and the noun that it may refer to."""
    words = row["text"].split(" ")
    index = int(row["span2_index"])
    words[index] = f"*{words[index]}*"
    label = int(row["label"])
    yield {"inputs": f"wsc: {' '.join(words)}", "targets": row["span1_text"], "label": label}


def _true_referent(row: Row) -> bool:
    """Returns whether the noun is the pronoun's referent; otherwise the right answer is unknown.

    Source: Raffel et al. 2020, section 2.4.
    """
    return int(row["label"]) == 1


def _refers(text: str, pair: TextPair, is_target: bool) -> Any:
    """Returns whether a predicted noun is the one in question, by their words."""
    if is_target:
        return pair["label"]
    given, noun = (_words(each) for each in (text, pair["targets"]))
    return int(bool(given) and bool(noun) and (given <= noun or noun <= given))


def _words(text: str) -> set[str]:
    cleaned = re.sub(r"[^\w\s]", " ", text.lower()).split()
    return {word for word in cleaned if word not in ("a", "an", "the")}


TASKS = (
    classification(
        "boolq", "super_glue/boolq", ("passage", "question"), _FALSE_TRUE, ("accuracy",)
    ),
    classification(
        "cb", "super_glue/cb", ("hypothesis", "premise"),
        ("entailment", "contradiction", "neutral"), ("macro_f1", "accuracy"),
    ),
    Supervised(
        "super_glue_copa", "super_glue/copa", _copa, ("accuracy",),
    ),
    Supervised(
        "super_glue_multirc", "super_glue/multirc", _multirc, ("f1", "grouped_exact_match"),
        _multirc_judged,
    ),
    Supervised("super_glue_record", "super_glue/record", _record, ("squad",), _answers),
    classification(
        "rte", "super_glue/rte", ("hypothesis", "premise"), ("entailment", "not_entailment"),
        ("accuracy",),
    ),
    classification(
        "wic", "super_glue/wic", ("sentence1", "sentence2", "word"), _FALSE_TRUE, ("accuracy",)
    ),
    Supervised(
        "super_glue_wsc", "super_glue/wsc.fixed", _wsc, ("accuracy",), _refers, _true_referent
    ),
)  # fmt: skip
