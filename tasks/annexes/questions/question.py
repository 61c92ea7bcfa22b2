"""A text with a gap and what may fill it, and files of such questions.

A line of a file is {"cloze": "The {} barks.", "choices": ["dog", "house"], "answer": 0}, with a
"group" if it belongs to one, or {"text": …}. Instead of "cloze" it may have "before" and "after".
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable
from typing import Any

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.texts import checked

GAP = "{}"
_FORMS = 'give {"text": …} or {"cloze": "… {} …", "choices": […], "answer": 0}'
# Longer texts are cut, so that no row is much longer than rows in training.
_TEXT_WORDS = 256
# Characters of the longest words, and of the parts of longer ones.
_LONGEST_WORD, _PART = 64, 4


@dataclasses.dataclass(frozen=True)
class Question:
    """A text with a gap; of `choices`, which may fill it, the one at `answer` belongs there.

    A question with one choice asks for its likelihood.
    """

    before: str
    choices: tuple[str, ...]
    answer: int = 0
    after: str = ""
    group: str = ""

    @property
    def is_text(self) -> bool:
        """True if there is nothing to choose."""
        return len(self.choices) == 1

    @property
    def cloze(self) -> str:
        """The text with its gap as {}."""
        return f"{self.before}{GAP}{self.after}"

    @property
    def right(self) -> str:
        """The choice that belongs into the gap."""
        return self.choices[self.answer]


def of_text(text: str) -> Question:
    """Returns the question for the second half of a text's `words_of`, given the first."""
    words = words_of(text)
    half = len(words) // 2
    return Question("".join(words[:half]), ("".join(words[half:]),))


def words_of(text: str) -> list[str]:
    """Returns a text's words, each but the last with a space after it.

    Longer ones than 64 characters, as in scripts without spaces, are divided into parts of 4.
    """
    found: list[str] = []
    for word in text.split():
        spaced, size = f"{word} ", len(word) if len(word) <= _LONGEST_WORD else _PART
        parts = [spaced[at : at + size] for at in range(0, len(word), size)]
        found += [*parts[:-1], spaced[(len(parts) - 1) * size :]]
    return [*found[:-1], *(last.rstrip() for last in found[-1:])]


def cut(text: str) -> list[Question]:
    """Returns the questions for a text of any length, in parts of at most 256 words."""
    words = words_of(text)
    parts = max(1, -(-len(words) // _TEXT_WORDS))
    ends = [len(words) * part // parts for part in range(parts + 1)]
    return [of_text("".join(words[a:b])) for a, b in itertools.pairwise(ends)]


def of_pair(good: str, bad: str, group: str = "") -> Question:
    """Returns the question which of two sentences is right; the gap is where their words differ."""
    a, b = good.split(), bad.split()
    shorter = min(len(a), len(b))
    first = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    # A choice without words could not fill a gap: leave it one of the common words.
    first = max(0, min(first, shorter - 1))
    most = shorter - first - 1
    last = next((i for i in range(most) if a[-1 - i] != b[-1 - i]), max(0, most))
    before, after = " ".join(a[:first]), " ".join(a[len(a) - last :])
    choices = (" ".join(a[first : len(a) - last]), " ".join(b[first : len(b) - last]))
    before, after = before + " " * bool(before), " " * bool(after) + after
    return Question(before, choices, 0, after, group)


def line(question: Question) -> dict[str, Any]:
    """Returns a question as a file has it."""
    if question.is_text:
        return {"text": question.before + question.right + question.after}
    gap = {"cloze": question.cloze}
    if GAP in question.before + question.after:
        gap = {"before": question.before, "after": question.after}
    group = {"group": question.group} if question.group else {}
    return {**gap, "choices": list(question.choices), "answer": question.answer, **group}


def write(path: str, questions: Iterable[Question]) -> None:
    """Writes a file of questions."""
    lines = (json.dumps(line(question), ensure_ascii=False) + "\n" for question in questions)
    files.write_bytes(path, "".join(lines).encode())


def read(path: str, flag: str) -> list[Question]:
    """Returns the questions of a file; `flag` names it in errors, as in --suite=FILE.

    Raises UserError if it is missing, empty, or has a line that is no question.
    """
    if not files.exists(path):
        raise UserError(f"{flag}: no such file")
    found = []
    for number, text in enumerate(files.read_lines(path), 1):
        if text.strip():
            place = f"{flag}, line {number}"
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: this is not JSON; {_FORMS}") from error
            checked(json.dumps(value, ensure_ascii=False), place)
            made = of_line(value, place)
            found += cut(value["text"]) if made.is_text else [made]
    if not found:
        raise UserError(f"{flag} has no questions; {_FORMS}")
    return found


def of_line(value: Any, place: str) -> Question:
    """Inverts `line`; raises UserError, which names the `place`, if the value is no question."""
    if not isinstance(value, dict):
        raise UserError(f"{place}: {_FORMS}")
    if isinstance(value.get("text"), str) and value["text"].strip():
        return of_text(value["text"])
    cloze, choices, answer = (value.get(name) for name in ("cloze", "choices", "answer"))
    before, after = value.get("before"), value.get("after")
    if isinstance(cloze, str) and cloze.count(GAP) == 1:
        before, after = cloze.split(GAP)
    if not (isinstance(before, str) and isinstance(after, str) and isinstance(choices, list)):
        raise UserError(f"{place}: {_FORMS}")
    texts = [str(choice) for choice in choices if isinstance(choice, str | int | float)]
    if not all(map(str.strip, texts)) or len(texts) != len(choices):
        raise UserError(f"{place}: choices must be texts, none of them empty")
    if type(answer) is not int or not 0 <= answer < len(texts) or len(texts) < 2:
        raise UserError(f"{place}: answer must be the index, from 0, of one of two or more choices")
    if texts.count(texts[answer]) > 1:
        raise UserError(f"{place}: the right choice {texts[answer]!r} is there twice")
    return Question(before, tuple(texts), answer, after, str(value.get("group") or ""))
