"""Scores of answered questions by set and group, their table, and files of answers."""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from tasks.annexes.questions import baselines, question
from tasks.annexes.questions.baselines import Baselines, Interval
from tasks.annexes.questions.question import Question
from tasks.storage import files
from tasks.terminal.command_line import UserError
from tasks.terminal.table import table

# The name of a suite's results, in place of a split's, and its folder in model_dir.
SUITE = "suite"
ACCURACY, BITS = "suite_accuracy", "suite_bits_per_byte"


class Score(NamedTuple):
    """The score of a set's group, or of all of it (None), in percent or bits per byte."""

    set: str
    group: str | None
    metric: str
    questions: int
    score: Interval
    baselines: Baselines


class Answered(NamedTuple):
    """A question with the log likelihood of each choice, in nats."""

    set: str
    question: Question
    scores: list[float]

    @property
    def is_right(self) -> bool:
        """True if the right choice is likelier than all others."""
        right = self.scores[self.question.answer]
        return sum(score >= right for score in self.scores) == 1

    @property
    def bits(self) -> float:
        """The bits that the right choice takes."""
        return -self.scores[self.question.answer] / math.log(2)


def of(answered: Sequence[Answered]) -> list[Score]:
    """Returns the scores of each set, first all of it and then its groups."""
    found: list[Score] = []
    for name in dict.fromkeys(each.set for each in answered):
        own = [each for each in answered if each.set == name]
        for is_text in (False, True):
            some = [each for each in own if each.question.is_text == is_text]
            groups = dict.fromkeys(each.question.group for each in some)
            found += [_score(name, None, some, is_text)] if some else []
            if len(groups) > 1:
                found += [
                    _score(name, group, [e for e in some if e.question.group == group], is_text)
                    for group in groups
                ]
    return found


def _score(name: str, group: str | None, some: Sequence[Answered], is_text: bool) -> Score:
    questions = [each.question for each in some]
    if is_text:
        sizes = [len(each.right.encode()) for each in questions]
        score = baselines.ratio([each.bits for each in some], sizes)
        return Score(name, group, BITS, len(some), score, baselines.of_texts(questions))
    score = baselines.share(sum(each.is_right for each in some), len(some))
    return Score(name, group, ACCURACY, len(some), score, baselines.of_choices(questions))


def results(found: Sequence[Score]) -> dict[str, dict[str, float]]:
    """Returns "suite/SET" -> metrics: the whole sets' scores and the ends of their intervals."""
    by_set: dict[str, dict[str, float]] = {}
    for each in found:
        if each.group is None:
            ends = {f"{each.metric}_low": each.score.low, f"{each.metric}_high": each.score.high}
            values = {each.metric: each.score.value} | ends
            by_set.setdefault(f"{SUITE}/{each.set}", {}).update(
                {name: value for name, value in values.items() if not math.isnan(value)}
            )
    return by_set


HEADER = ("set", "group", "questions", "score", "95 %", "chance", "unigram", "copying")


def cells(score: Score) -> tuple[str, ...]:
    """Returns a score's row under HEADER."""
    number, unit = ("{:.1f}", " %") if score.metric == ACCURACY else ("{:.3f}", " bits/byte")
    ends = [number.format(end) for end in score.score[1:]]
    return (
        score.set,
        "all" if score.group is None else score.group or "-",
        f"{score.questions:,}",
        number.format(score.score.value) + unit,
        "-" if math.isnan(score.score.low) else " to ".join(ends),
        *(number.format(value) for value in score.baselines),
    )


def shown(found: Sequence[Score]) -> str:
    """Returns the table of scores."""
    return table(list(HEADER), [list(cells(each)) for each in found])


def path(model_dir: str, name: str) -> str:
    """Returns the file of a run's answers; `name` is the step, with .AVERAGE if of an average."""
    return files.join(model_dir, SUITE, f"{name}.jsonl")


def write(file: str, answered: Sequence[Answered]) -> None:
    """Writes a line for each question, with the log likelihoods of its choices.

    Keeps the answers to other sets that the file has.
    """
    sets = {each.set for each in answered}
    others = [each for each in read(file) if each.set not in sets] if files.exists(file) else []
    lines = (
        {
            "set": each.set,
            **question.line(each.question),
            "scores": each.scores,
        }
        for each in [*others, *answered]
    )
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    files.make_folder(file.rpartition("/")[0])
    files.write_bytes(file, text.encode())


def read(file: str) -> list[Answered]:
    """Inverts `write`; raises UserError, which names the file, if it is damaged."""
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in files.read_lines(file)]
        return [
            Answered(each["set"], question.of_line(each, file), each["scores"]) for each in lines
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: delete it, and answer the suite again") from error
