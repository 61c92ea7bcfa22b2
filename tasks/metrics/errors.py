"""Error rates: edits per character or word of the targets."""

from collections.abc import Callable, Sequence
from typing import Any

from tasks.metrics.text import of_examples, references


@of_examples
def character_error_rate(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the Levenshtein distance as a percentage of all targets' characters."""
    return {"character_error_rate": _rate(targets, predictions, list)}


@of_examples
def word_error_rate(targets: Sequence[Any], predictions: Sequence[str]) -> dict[str, float]:
    """Returns the Levenshtein distance as a percentage of all targets' words.

    Words are what spaces separate, with their case and punctuation; `character_error_rate` is for
    scripts without spaces.
    """
    return {"word_error_rate": _rate(targets, predictions, str.split)}


def _rate(
    targets: Sequence[Any], predictions: Sequence[str], parts_of: Callable[[str], list[str]]
) -> float:
    """Returns edits as a percentage of the targets' parts; uses the nearest of several targets."""
    from editdistance import eval as distance

    edits = parts = 0
    for target, prediction in zip(targets, predictions, strict=True):
        choices = [parts_of(reference) for reference in references(target)]
        given = parts_of(prediction)
        found, right = min(
            ((distance(choice, given), choice) for choice in choices), key=lambda pair: pair[0]
        )
        edits, parts = edits + found, parts + len(right)
    return 100 * edits / max(parts, 1)
