"""Exact match, and the metrics of SQuAD."""

import functools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tasks.terminal.command_line import UserError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)

_Compute = Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]


def of_examples(compute: _Compute) -> _Compute:
    """Decorates a metric: it raises ValueError without targets, or with other predictions."""

    @functools.wraps(compute)
    def checked(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
        if not len(targets) or len(targets) != len(predictions):
            raise ValueError(f"{len(targets)} targets and {len(predictions)} predictions")
        return compute(targets, predictions)

    return checked


def references(target: Any) -> list[str]:
    """Returns the texts that a target accepts, "" if it lists none.

    Raises UserError for a label or a number.
    """
    if isinstance(target, Mapping) or not isinstance(target, Iterable):
        raise UserError(
            f"this metric needs texts, but a target is {target!r}: use a metric of labels, such as "
            "accuracy, or leave out --evaluation.supervised"
        )
    return [target] if isinstance(target, str) else [*map(str, target)] or [""]


@of_examples
def exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the percentage of predictions that equal a target, ignoring outer white space."""
    right = 0
    for target, prediction in zip(targets, predictions, strict=True):
        if isinstance(prediction, str):
            right += prediction.strip() in [reference.strip() for reference in references(target)]
        else:
            right += prediction == target
    return {"exact_match": 100 * right / len(targets)}


@of_examples
def squad(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns SQuAD's "em" and "f1" in percent, each the best over a question's answers.

    Case, punctuation, English articles and spaces are ignored.

    Source: Rajpurkar et al. 2016 (arXiv:1606.05250), section 6.1.
    Differences: two answers without words agree, as in SQuAD 2; in T5 their F1 is 0. Punctuation is
    Unicode's, as in MLQA (Lewis et al. 2019, arXiv:1910.07475); in SQuAD and T5 it is ASCII's.
    Words of F1 are what spaces separate, in every script.
    """
    matches = overlap = 0.0
    for target, prediction in zip(targets, predictions, strict=True):
        answers = [normalized_answer(reference) for reference in references(target)]
        given = normalized_answer(prediction)
        matches += given in answers
        overlap += max(_f1(answer.split(), given.split()) for answer in answers)
    return {"em": 100 * matches / len(targets), "f1": 100 * overlap / len(targets)}


@of_examples
def token_f1(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns only SQuAD's F1, as "token_f1"."""
    return {"token_f1": squad(targets, predictions)["f1"]}


def normalized_answer(text: str) -> str:
    """Removes case, punctuation, articles and superfluous spaces."""
    plain = text.lower().translate(_WITHOUT_PUNCTUATION)
    if not plain.isascii():
        plain = unicodedata.normalize("NFC", plain)
        plain = "".join(each for each in plain if unicodedata.category(each)[0] != "P")
    return " ".join(_ARTICLES.sub(" ", plain).split())


def _f1(target: list[str], prediction: list[str]) -> float:
    common = sum((Counter(target) & Counter(prediction)).values())
    if not common:
        # Two empty answers agree.
        return float(target == prediction)
    precision, recall = common / len(prediction), common / len(target)
    return 2 * precision * recall / (precision + recall)
