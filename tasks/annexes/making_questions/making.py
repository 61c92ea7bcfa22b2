"""Makes questions from texts, the same ones for the same texts and seed."""

import itertools
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tasks.annexes.questions import question
from tasks.annexes.questions.question import Question

# Words around the gap of a cloze, on either side.
_CONTEXT = 24
# Words of a text whose second half is scored.
_TEXT = 96
# Spans that compete with the right one: of its number of words and of similar frequency.
_NEIGHBOURS = 40
_LENGTHS = (1, 2, 3)
_BANDS = ("rare", "medium", "frequent")
# Distances in words between a gap and the earlier place of its word.
_DISTANCES = ((8, 16), (16, 32), (32, 64), (64, 128), (128, 256))
_COPIED = (4, 8, 16, 32)
# Words of a sentence with a gap that training texts can answer, words on either side of the gap,
# and how often training texts have them, with the same word between them each time.
_SENTENCE = (6, 24)
_SIDE = 2
_SEEN = (3, 5, 10)
_DIGITS = (1, 2, 3)


class _Place(NamedTuple):
    """A span of words in a text: the text's number, its first word, and how many."""

    text: int
    first: int
    words: int


class _Texts:
    """Texts as words, with the frequencies of their words.

    `held_out` are the texts whose numbers are given: a model does not train on them.
    """

    def __init__(self, texts: Sequence[str], held_out: Collection[int] = ()):
        self.held_out = {number: texts[number] for number in held_out}
        self.words = [text.split() for text in texts]
        self.counts = Counter(word for words in self.words for word in words)

    def plain(self, word: str) -> bool:
        """Returns whether a word may be in a gap: letters, with marks of accents and vowels.

        It has no capitals, as a name or the beginning of a sentence would give itself away.
        """
        kinds = {unicodedata.category(character)[0] for character in word}
        return kinds <= {"L", "M"} and "L" in kinds and word == word.lower()

    def span(self, place: _Place) -> tuple[str, ...]:
        return tuple(self.words[place.text][place.first : place.first + place.words])

    def frequency(self, span: Sequence[str]) -> float:
        """Returns the mean of the logarithms of the words' counts."""
        return math.fsum(math.log(self.counts[word]) for word in span) / len(span)

    def spans(self, length: int) -> Iterator[_Place]:
        """Yields the places of spans of plain words."""
        for text, words in enumerate(self.words):
            plain = [self.plain(word) for word in words]
            for first in range(1, len(words) - length):
                if all(plain[first : first + length]):
                    yield _Place(text, first, length)

    def around(self, place: _Place, before: int, after: int) -> tuple[str, str]:
        """Returns the text before and after a span, at most so many words of it."""
        words, end = self.words[place.text], place.first + place.words
        start = max(0, place.first - before)
        left, right = words[start : place.first], words[end : end + after]
        return " ".join(left) + " " * bool(left), " " * bool(right) + " ".join(right)


def _bare(text: str) -> list[str]:
    """Returns a text's words in lower case without punctuation, such as "handler" of "handler."."""
    kept = (c if unicodedata.category(c)[0] in "LMN" else " " for c in text.lower())
    return "".join(kept).split()


def _asked(
    draw: random.Random, before: str, right: str, wrong: Sequence[str], after: str, group: str
) -> Question:
    choices = [right, *wrong]
    draw.shuffle(choices)
    return Question(before, tuple(choices), choices.index(right), after, group)


def _similar(
    spans: Sequence[str], place: int, wrong: int, draw: random.Random, taken: frozenset[str]
) -> list[str]:
    """Returns `wrong` of the spans nearest to `place` in their order, none of them `taken`."""
    near = spans[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS + 1]
    others = [each for each in near if each not in taken]
    return draw.sample(others, wrong) if len(others) >= wrong else []


def cloze(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields clozes of one to three words, rare to frequent; wrong spans are about as frequent."""
    per_group = -(-count // (len(_LENGTHS) * len(_BANDS)))
    for length in _LENGTHS:
        places = list(texts.spans(length))
        by_span = {" ".join(texts.span(each)): texts.frequency(texts.span(each)) for each in places}
        ordered = sorted(by_span, key=lambda span: (by_span[span], span))
        rank = {span: number for number, span in enumerate(ordered)}
        draw.shuffle(places)
        # Thirds of the places, not of the spans: most spans are rare.
        places.sort(key=lambda place: by_span[" ".join(texts.span(place))])
        for number, band in enumerate(_BANDS):
            first, end = (len(places) * (number + more) // len(_BANDS) for more in (0, 1))
            for place in draw.sample(places[first:end], min(per_group, end - first)):
                right = " ".join(texts.span(place))
                others = _similar(ordered, rank[right], wrong, draw, frozenset({right}))
                if others:
                    before, after = texts.around(place, _CONTEXT, _CONTEXT)
                    words = f"{length} word{'s' * (length > 1)}"
                    yield _asked(draw, before, right, others, after, f"{words}, {band}")


def long_cloze(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields clozes of words that occur once before, 9 to 256 words away.

    Wrong words are about as frequent, and do not occur in the question's text.
    """
    plain = [word for word in texts.counts if texts.plain(word) and len(word) > 3]
    ordered = sorted(plain, key=lambda word: (texts.counts[word], word))
    rank = {word: number for number, word in enumerate(ordered)}
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {each: [] for each in _DISTANCES}
    for text, words in enumerate(texts.words):
        last: dict[str, int] = {}
        for second, word in enumerate(words):
            if word not in rank:
                continue
            first, last[word] = last.get(word), second
            for least, most in _DISTANCES:
                if first is not None and least < second - first <= most:
                    found[least, most].append((text, first, second))
    per_group = -(-count // len(_DISTANCES))
    for (least, most), pairs in found.items():
        made = 0
        for text, first, second in draw.sample(pairs, len(pairs)):
            words = texts.words[text]
            right = words[second]
            if texts.counts[right] > 16:
                continue
            context = Counter(_bare(" ".join(words[max(0, first - 4) : second + 5])))
            if context[right] != 2:
                continue
            others = _similar(ordered, rank[right], wrong, draw, frozenset(context))
            if others and made < per_group:
                made += 1
                place = _Place(text, second, 1)
                before, after = texts.around(place, second - max(0, first - 4), 4)
                group = f"{least + 1} to {most} words away"
                yield _asked(draw, before, right, others, after, group)


def order(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields pairs of texts, one with two neighbouring words exchanged."""
    places = [span for span in texts.spans(2) if len(set(texts.span(span))) == 2]
    for place in draw.sample(places, min(count, len(places))):
        a, b = texts.span(place)
        before, after = texts.around(place, _CONTEXT // 2, _CONTEXT // 2)
        yield _asked(draw, before, f"{a} {b}", [f"{b} {a}"], after, "")


def copying(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields lists of 4 to 32 words, twice; wrong words are from elsewhere in the list."""
    words = [word for word in texts.counts if texts.plain(word) and len(word) > 2]
    for length in _COPIED:
        for _ in range(-(-count // len(_COPIED)) if len(words) >= length else 0):
            chosen = draw.sample(words, length)
            place = draw.randrange(1, length)
            others = draw.sample(chosen[:place] + chosen[place + 1 :], min(wrong, length - 1))
            before = f"{' '.join(chosen)}. {' '.join(chosen[:place])} "
            after = " " * (place < length - 1) + " ".join(chosen[place + 1 :])
            yield _asked(draw, before, chosen[place], others, after, f"{length} words")


def arithmetic(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields sums and differences of numbers of one to three digits; wrong answers are near."""
    for digits in _DIGITS:
        numbers = range(10 ** (digits - 1), 10**digits)
        asked = set[tuple[int, int, str]]()
        wanted = -(-count // len(_DIGITS))
        # One digit has 90 questions.
        while len(asked) < min(wanted, len(numbers) * (len(numbers) + 1)):
            b, a = sorted(draw.choices(numbers, k=2))
            sign, answer = ("+", a + b) if len(asked) % 2 else ("-", a - b)
            if (a, b, sign) in asked:
                continue
            asked.add((a, b, sign))
            steps = (-10, *range(-wrong, 0), *range(1, wrong + 1), 10)
            near = [str(answer + step) for step in steps if answer + step >= 0]
            others = draw.sample(list(dict.fromkeys(near)), wrong)
            group = f"{digits} digit{'s' * (digits > 1)}"
            yield _asked(draw, f"{a} {sign} {b} = ", str(answer), others, ".", group)


def seen(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields sentences of held-out texts without a word that the other texts give.

    They have its two neighbours on either side three times or more, and always the same word
    between them, whatever the sentence's own word is. Wrong words are about as frequent.
    """
    found: dict[tuple[str, ...], Counter[str]] = {}
    for number, words in enumerate(texts.words):
        if number in texts.held_out:
            continue
        for place in range(_SIDE, len(words) - _SIDE):
            found.setdefault(_sides(words, place), Counter())[words[place]] += 1
    plain = sorted(filter(texts.plain, texts.counts), key=lambda word: (texts.counts[word], word))
    rank = {word: number for number, word in enumerate(plain)}
    asked: list[Question] = []
    for words in itertools.chain.from_iterable(map(_sentences, texts.held_out.values())):
        for place in range(_SIDE, len(words) - _SIDE):
            right, between = words[place], found.get(_sides(words, place), Counter())
            times = between.total()
            if len(between) != 1 or times < _SEEN[0] or words.count(right) > 1:
                continue
            if not texts.plain(right) or len(right) < 2:
                continue
            if others := _similar(plain, rank[right], wrong, draw, frozenset({right, *between})):
                before, after = " ".join(words[:place]), " ".join(words[place + 1 :])
                least = max(each for each in _SEEN if each <= times)
                group = f"seen {least} times or more"
                asked.append(_asked(draw, f"{before} ", right, others, f" {after}", group))
    yield from draw.sample(asked, min(count, len(asked)))


def _sides(words: Sequence[str], place: int) -> tuple[str, ...]:
    return (*words[place - _SIDE : place], *words[place + 1 : place + 1 + _SIDE])


def _sentences(text: str) -> Iterator[list[str]]:
    """Yields the words of the whole sentences in a text's paragraphs: prose, 6 to 24 words."""
    for paragraph in re.split(r"\n\s*\n", text):
        sentence: list[str] = []
        words = paragraph.split()
        for word, after in itertools.zip_longest(words, words[1:]):
            sentence.append(word)
            if word[-1] in ".!?" and not (after and after[0].islower()):
                fits = _SENTENCE[0] <= len(sentence) <= _SENTENCE[1]
                if fits and all(map(_is_prose, sentence)):
                    yield sentence
                sentence = []


def _is_prose(word: str) -> bool:
    """Returns whether a word has letters, marks and the punctuation of prose."""
    kinds = ("L", "M", "Pd", "Ps", "Pe", "Pi", "Pf")
    return all(unicodedata.category(c).startswith(kinds) or c in ".,;:!?'\"" for c in word)


def text(texts: _Texts, count: int, wrong: int, draw: random.Random) -> Iterator[Question]:
    """Yields beginnings of texts, for bits per byte."""
    longest = [words for words in texts.words if len(words) >= _TEXT // 4]
    for words in draw.sample(longest, min(count, len(longest))):
        yield question.of_text(" ".join(words[:_TEXT]))


_Kind = Callable[[_Texts, int, int, random.Random], Iterator[Question]]
KINDS: Mapping[str, _Kind] = MappingProxyType(
    {
        "cloze": cloze,
        "long_cloze": long_cloze,
        "order": order,
        "copying": copying,
        "arithmetic": arithmetic,
        "seen": seen,
        "text": text,
    }
)


def make(
    kind: str,
    texts: Sequence[str],
    count: int,
    wrong: int,
    seed: int,
    held_out: Collection[int] = (),
) -> list[Question]:
    """Returns about `count` questions of one of KINDS, with `wrong` wrong choices each.

    Fewer if the texts do not have as many; none occurs twice. `held_out` has the numbers of the
    texts that a model does not train on; the kind `seen` asks about them.
    """
    made = KINDS[kind](_Texts(texts, held_out), count, wrong, random.Random(f"{kind} {seed}"))
    return different(each for each in made if question.GAP not in each.before + each.after)


def different(questions: Iterable[Question]) -> list[Question]:
    """Returns questions that differ, whatever the order of their choices."""
    found: dict[tuple[object, ...], Question] = {}
    for each in questions:
        found.setdefault((each.before, frozenset(each.choices), each.after), each)
    return [*found.values()]
