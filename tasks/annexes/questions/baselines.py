"""Baselines of a set of questions, which need no model, and intervals of scores."""

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tasks.annexes.questions.question import Question

# Two-sided 95 %.
_Z = 1.959964
_WORD = re.compile(r"\w+")


class Interval(NamedTuple):
    """A value and its interval of 95 %."""

    value: float
    low: float
    high: float


class Baselines(NamedTuple):
    """Scores without a model, in a set's unit.

    Percent right by guessing (`chance`), by the choice of the most frequent words in the set's
    other text (`unigram`), and by the choice whose words are most often in the question's own
    (`copying`). Of texts, bits per byte: 8 (`chance`), the entropy of the set's bytes (`unigram`),
    and what zlib needs for a second half once it has read the first (`copying`).
    """

    chance: float
    unigram: float
    copying: float


def of_choices(questions: Sequence[Question]) -> Baselines:
    """Returns the percentages of right choices; equal ones share their point."""
    contexts = [_words(each.before + " " + each.after) for each in questions]
    counts = Counter(word for words in contexts for word in words)

    def frequency(question: Question, choice: str, context: Counter[str]) -> float:
        words = _words(choice)
        elsewhere = (math.log1p(counts[word] - context[word]) for word in words)
        return math.fsum(elsewhere) / max(1, len(words))

    def repeated(question: Question, choice: str, context: Counter[str]) -> float:
        words = _words(choice)
        return sum(context[word] for word in words) / max(1, len(words))

    def right(score: Callable[[Question, str, Counter[str]], float]) -> float:
        total = 0.0
        for question, words in zip(questions, contexts, strict=True):
            context = Counter(words)
            scores = [score(question, choice, context) for choice in question.choices]
            best = max(scores)
            total += (scores[question.answer] == best) / scores.count(best)
        return 100 * total / len(questions)

    chance = 100 * math.fsum(1 / len(each.choices) for each in questions) / len(questions)
    return Baselines(chance, right(frequency), right(repeated))


def of_texts(questions: Sequence[Question]) -> Baselines:
    """Returns bits per byte of the second halves."""
    halves = [(question.before.encode(), question.right.encode()) for question in questions]
    counts = Counter(byte for _, second in halves for byte in second)
    total = max(1, counts.total())
    entropy = -math.fsum(n / total * math.log2(n / total) for n in counts.values())
    compressed = 0
    for first, second in halves:
        # -15: neither a header nor a checksum.
        packer = zlib.compressobj(9, zlib.DEFLATED, -15, zdict=first or b" ")
        compressed += len(packer.compress(second) + packer.flush())
    return Baselines(8.0, entropy, 8 * compressed / total)


def share(right: int, count: int) -> Interval:
    """Returns a percentage with Wilson's interval.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    p, z2 = right / count, _Z**2 / count
    middle = (p + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (p * (1 - p) + z2 / 4)) / (1 + z2)
    return Interval(100 * p, 100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """Returns sum(parts) / sum(wholes), over pairs drawn at random, with its normal interval.

    Source: Cochran 1977, Sampling Techniques, equation 2.46, for a large population.
    """
    count, whole = len(parts), math.fsum(wholes)
    value = math.fsum(parts) / whole
    if count < 2:
        return Interval(value, math.nan, math.nan)
    squares = math.fsum((a - value * b) ** 2 for a, b in zip(parts, wholes, strict=True))
    half = _Z * math.sqrt(squares * count / (count - 1)) / whole
    return Interval(value, value - half, value + half)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
