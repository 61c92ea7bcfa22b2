"""Fills the gaps of a text.

    palimpsest fill "The <extra_id_0> returns <extra_id_1>." --model_dir=DIR
    palimpsest fill --questions=FOLDER/seen.jsonl --model_dir=DIR

Prints the text with the model's words for each gap in brackets. A UL2 model also reads the mode at
the beginning of its inputs. With --questions it fills the gaps of questions, says how many it
fills with the right words, and prints the one of these texts of which it is surest.
"""

import dataclasses
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tasks.annexes.questions import baselines, sets
from tasks.annexes.questions.question import Question
from tasks.terminal.command import Command
from tasks.terminal.command_line import UserError
from tasks.terminal.flag_fields import field
from tasks.vocabulary import sentinel_piece
from trainer.config.decoding import Decoding, TrainedFlags

if TYPE_CHECKING:
    from trainer.inference.generator import Generator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags(TrainedFlags):
    """Flags of the command."""

    text: str = field("", "text with gaps: 'The <extra_id_0> returns.'", positional=True)
    questions: str | None = field(
        None,
        "in place of a text, questions with one gap each, as for --suite of evaluate; their wrong "
        "choices are not used",
        metavar="SUITE",
    )
    decoding: Decoding = field(Decoding, "how tokens are chosen", flat=True)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.questions):
            raise UserError("give a text with gaps, or --questions=SUITE")


def filled(flags: Flags, opened: "Callable[[Flags], Generator]") -> Iterator[str]:
    """Yields the filled texts by the generator that `opened` returns; notes gaps without words."""
    from trainer.inference import text

    gaps = text.sentinels(flags.text)
    if not gaps:
        raise UserError(f"{flags.text!r} has no gap: mark one with <extra_id_0>")
    generator = opened(flags)
    for found in generator([generator.ids(flags.text)]):
        spans = text.spans(generator.vocabulary, found.ids)
        yield text.filled(flags.text, spans)
        missing = [sentinel_piece(gap) for gap in dict.fromkeys(gaps) if gap not in spans]
        if missing := [piece for piece in missing if piece not in generator.modes]:
            print(f"the model left out {', '.join(missing)}", file=sys.stderr)


class Answer(NamedTuple):
    """A question, the words that a model fills its gap with, and their log probability."""

    question: Question
    words: str
    score: float

    @property
    def is_right(self) -> bool:
        """True if the words are those of the right choice."""
        return self.words.split() == self.question.right.split()


def answers(flags: Flags, opened: "Callable[[Flags], Generator]") -> list[Answer]:
    """Returns the answers to `flags.questions` by the generator that `opened` returns.

    Its outputs end at <extra_id_1>, which follows the words for the gap, or at EOS, which
    follows them at the end of a text.
    """
    from trainer.inference import text

    assert flags.questions
    if flags.decoding.num_return_sequences > 1:
        raise UserError("--num_return_sequences: --questions compares one answer: leave one out")
    found = itertools.chain.from_iterable(sets.load(flags.questions, flag="--questions").values())
    asked = [each for each in found if not each.is_text]
    if not asked:
        raise UserError(f"--questions={flags.questions} has no gaps to fill, only texts")
    generator = opened(flags)
    gap = sentinel_piece(0)
    prompts = [generator.ids(f"{each.before}{gap}{each.after}") for each in asked]
    own = generator.vocabulary
    answered: list[Answer] = []
    for each, made in zip(asked, generator(prompts), strict=True):
        ids = itertools.takewhile(lambda token: token != own.special.eos, made.ids)
        words = text.spans(own, np.fromiter(ids, np.int32)).get(0, "")
        answered.append(Answer(each, words, made.score))
    return answered


def summary(found: Sequence[Answer]) -> Iterator[str]:
    """Yields lines: the share of gaps that is right, a baseline, and the surest right text."""
    count = len(found)
    right = [each for each in found if each.is_right]
    share = baselines.share(len(right), count)
    ((common, times),) = Counter(each.question.right for each in found).most_common(1)
    yield f"gaps filled      {count:,}"
    yield f"rightly          {len(right):,}, {share.value:.1f}% [{share.low:.1f}, {share.high:.1f}]"
    yield f"always [{common}]".ljust(17) + f"{times:,}, {100 * times / count:.1f}%"
    if right:
        surest = max(right, key=lambda each: each.score)
        yield ""
        yield f"{surest.question.before}[{surest.question.right}]{surest.question.after}"


def run(flags: Flags) -> None:
    """Prints the filled text, or what the model makes of questions."""
    from trainer.inference import prompts

    def opened(flags: Flags) -> "Generator":
        end = sentinel_piece(1) if flags.questions else None
        return prompts.generator_of(flags, flags.decoding, end)

    lines = summary(answers(flags, opened)) if flags.questions else filled(flags, opened)
    for line in lines:
        print(line)


main = Command(Flags, run, at_once="run the same command again")

if __name__ == "__main__":
    main.start()
