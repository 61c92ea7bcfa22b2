"""SuperGLUE in T5's format.

Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.4 and appendix D; T5, `glue_utils` and
`preprocessors`; Wang et al. 2019 (arXiv:1905.00537) for each task's metrics.
Differences: the paper's WiC also names the part of speech; its code does not. T5 also has the
diagnostic sets AX-b and AX-g, whose labels are not public, and DPR. Its macro F1 for CB covers
three classes; this one covers the classes among the targets.
"""

import re
from collections.abc import Iterator
from typing import Any

from tasks.annexes.t5_tasks.generation import answers
from tasks.annexes.t5_tasks.template import (
    UNKNOWN,
    Row,
    Supervised,
    TextPair,
    classification,
    joined,
)

_FALSE_TRUE = ("False", "True")


def _multirc(row: Row) -> Iterator[TextPair]:
    label = int(row["label"])
    index = row["idx"]
    text = joined("multirc", row, ("question", "answer", "paragraph"))
    yield {
        # Remove the HTML.
        "inputs": re.sub("</?b>", "", text.replace("<br>", " ")),
        "targets": _FALSE_TRUE[label] if label >= 0 else UNKNOWN,
        "group": f"{index['paragraph']}-{index['question']}",
    }


def _multirc_judged(text: str, pair: TextPair, _is_target: bool) -> Any:
    value = _FALSE_TRUE.index(text) if text in _FALSE_TRUE else -1
    return {"group": pair["group"], "value": value}


def _record(row: Row) -> Iterator[TextPair]:
    """Yields one example per correct answer, or a single one if there is no answer."""
    passage = re.sub(r"(\.|\?|\!|\"|\')\n@highlight\n", r"\1 ", row["passage"])
    passage = re.sub(r"\n@highlight\n", ". ", passage)
    entities = ", ".join(row["entities"])
    inputs = f"record query: {row['query']} entities: {entities} passage: {passage}"
    correct = list(row["answers"])
    for answer in dict.fromkeys(correct) or [UNKNOWN]:
        yield {"inputs": inputs, "targets": answer, "answers": correct}


def _wsc(row: Row) -> Iterator[TextPair]:
    """Yields a text with a marked pronoun, and the noun that the pronoun may refer to."""
    words, pronoun = row["text"].split(" "), row["span2_text"]
    index = int(row["span2_index"])
    # One row has the index of the word before; in another, punctuation is part of the word.
    if words[index] != pronoun and words[index + 1 : index + 2] == [pronoun]:
        index += 1
    rest = words[index].removeprefix(pronoun)
    words[index : index + 1] = [f"*{pronoun}*", rest] if rest else [f"*{pronoun}*"]
    label = int(row["label"])
    yield {"inputs": f"wsc: {' '.join(words)}", "targets": row["span1_text"], "label": label}


def _true_referent(row: Row) -> bool:
    # If the noun is not the referent, no answer is known. Source: Raffel et al. 2020, section 2.4.
    return int(row["label"]) == 1


def _refers(text: str, pair: TextPair, is_target: bool) -> Any:
    """Returns 1 if a predicted noun matches the noun in question, 0 if not, -1 if there is none.

    Case, determiners and further words in one of the nouns are ignored. Nouns differ if only one
    has an apostrophe: "Bob" is not "Bob's hat".

    Source: T5, `postprocessors.wsc_simple`.
    """
    if is_target:
        return pair["label"]
    given, noun = (_words(each) for each in (text, pair["targets"]))
    if given == {""}:
        return -1
    apostrophes = ["'" in "".join(words) for words in (given, noun)]
    return int(apostrophes[0] == apostrophes[1] and (given <= noun or noun <= given))


# Source: T5, `postprocessors.wsc_simple`.
_DETERMINERS = frozenset(
    {
        *("a", "an", "the", "this", "that", "these", "those", "which", "whose"),
        *("each", "every", "few", "many", "much", "some"),
        *("my", "your", "his", "her", "our", "their"),
    }
)


def _words(text: str) -> set[str]:
    return {*text.strip().lower().split(" ")} - _DETERMINERS or {""}


TASKS = (
    classification(
        "boolq", "super_glue/boolq", ("passage", "question"), _FALSE_TRUE, ("accuracy",)
    ),
    classification(
        "cb", "super_glue/cb", ("hypothesis", "premise"),
        ("entailment", "contradiction", "neutral"), ("macro_f1", "accuracy"),
    ),
    classification(
        "copa", "super_glue/copa", ("choice1", "choice2", "premise", "question"),
        ("choice1", "choice2"), ("accuracy",),
    ),
    Supervised(
        "super_glue_multirc", "super_glue/multirc", _multirc, ("f1", "grouped_exact_match"),
        _multirc_judged,
    ),
    Supervised("super_glue_record", "super_glue/record", _record, ("squad",), answers),
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
