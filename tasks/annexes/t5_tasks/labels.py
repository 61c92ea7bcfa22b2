"""Metrics of labels and numbers, computed by scikit-learn and scipy."""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tasks.metrics.metric import TEXT, Metric
from tasks.metrics.text import of_examples
from tasks.terminal.command_line import UserError


@of_examples
def accuracy(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the percentage of predictions that equal their target."""
    right = sum(bool(one == other) for one, other in zip(targets, predictions, strict=True))
    return {"accuracy": 100 * right / len(targets)}


@of_examples
def f1(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the F1 of the positive class, label 1 or true, in percent.

    A prediction other than 1, true, 0 and false counts as the opposite of its target. A label may
    be the "value" of a dict, as for `grouped_exact_match`.

    Source: T5, `metrics.f1_score_with_invalid`.
    """
    from sklearn import metrics

    if all(_positive(each) is None for each in targets):
        raise UserError(
            f"f1 needs labels 1 and 0 or true and false, but a target is {targets[0]!r}: use "
            "macro_f1, or set --evaluation.supervised to the task that makes labels from texts"
        )
    right = [_positive(each) or False for each in targets]
    given = [_positive(prediction) for prediction in predictions]
    given = [
        not target if each is None else each for target, each in zip(right, given, strict=True)
    ]
    return {"f1": 100 * metrics.f1_score(right, given, zero_division=0.0)}


def _positive(label: Any) -> bool | None:
    """Returns True for a positive label, False for a negative one, None for any other value."""
    value = label["value"] if isinstance(label, dict) else label
    return {"1": True, "true": True, "0": False, "false": False}.get(str(value).lower())


@of_examples
def macro_f1(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the mean F1 over the targets' classes, in percent, as used for CB."""
    from sklearn import metrics

    texts = [[str(each) for each in of] for of in (targets, predictions)]
    labels = sorted({*texts[0]})
    found = metrics.f1_score(*texts, labels=labels, average="macro", zero_division=0.0)
    return {"macro_f1": 100 * found}


@of_examples
def matthews(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the Matthews correlation of labels times 100; 0 if one side is constant."""
    from sklearn import metrics

    texts = [[str(each) for each in of] for of in (targets, predictions)]
    if any(len(set(side)) == 1 for side in texts):
        return {"matthews": 0.0}
    return {"matthews": 100 * metrics.matthews_corrcoef(*texts)}


@of_examples
def pearson(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Pearson's correlation times 100; 0 if one side is constant."""
    return {"pearson": _correlation("pearsonr", targets, predictions)}


@of_examples
def spearman(targets: Sequence[float], predictions: Sequence[float]) -> dict[str, float]:
    """Returns Spearman's rank correlation times 100; 0 if one side is constant."""
    return {"spearman": _correlation("spearmanr", targets, predictions)}


def _correlation(name: str, targets: Sequence[float], predictions: Sequence[float]) -> float:
    sides = [[_number(each) for each in side] for side in (targets, predictions)]
    if any(len(set(side)) < 2 for side in sides):
        return 0.0
    from scipy import stats

    return 100 * float(getattr(stats, name)(*sides).statistic)


def _number(value: Any) -> float:
    """Parses a finite number; returns -1 for anything else, as T5 does for STS-B."""
    try:
        number = float(value)
    except ValueError:
        return -1.0
    return number if math.isfinite(number) else -1.0


@of_examples
def grouped_exact_match(targets: Sequence[Any], predictions: Sequence[Any]) -> dict[str, float]:
    """Returns the percentage of groups with only correct predictions, as in MultiRC.

    Targets and predictions are dicts with "group" and "value"; a prediction belongs to its
    target's group.
    """
    if not all(isinstance(each, dict) for each in targets):
        raise UserError(
            "grouped_exact_match needs targets with a group and a value: set "
            "--evaluation.supervised to the task that makes them"
        )
    right: dict[Any, bool] = defaultdict(lambda: True)
    for target, prediction in zip(targets, predictions, strict=True):
        given = prediction["value"] if isinstance(prediction, dict) else prediction
        right[target["group"]] &= target["value"] == given
    return {"grouped_exact_match": 100 * sum(right.values()) / len(right)}


ACCURACY = Metric("accuracy", accuracy, False, (f"{TEXT}accuracy",))
F1 = Metric("f1", f1, False, package="sklearn")
GROUPED_EXACT_MATCH = Metric("grouped_exact_match", grouped_exact_match, False)
MACRO_F1 = Metric("macro_f1", macro_f1, False, package="sklearn")
MATTHEWS = Metric("matthews", matthews, False, package="sklearn")
PEARSON = Metric("pearson", pearson, False, package="scipy")
SPEARMAN = Metric("spearman", spearman, False, package="scipy")
