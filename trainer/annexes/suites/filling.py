"""Turns a question into rows whose likelihoods answer it, for any architecture."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tasks import registry
from tasks.annexes.questions.question import Question, words_of
from tasks.objectives import Objective
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary, sentinel_piece
from trainer.config import Config
from trainer.data.mixing import mixtures_of
from trainer.data.run import Run

Ids = list[int]
# Positions of a question where the model sets no limit, so that no row exhausts the memory.
_LONGEST = 8192
# Words of a text that are filled at once: about T5's mean span of three tokens.
_WORDS = 2
# Names of BERT's pieces in known vocabularies, after those of the run's task.
_MASKS = ("[MASK]", "<mask>", sentinel_piece(0))
_FIRST = ("[CLS]", "<s>", "<cls>", sentinel_piece(1))


class Filled(NamedTuple):
    """A row: ids of inputs and targets. The targets from `first` to `end` count."""

    inputs: np.ndarray
    targets: np.ndarray
    first: int
    end: int


class _Cut(NamedTuple):
    """A choice in its text: ids before it, its own, and ids after it."""

    before: Ids
    span: Ids
    after: Ids


class Filling:
    """Makes the rows of questions for a run's model and vocabulary.

    A choice is the part of its text's tokens that its question's other choices do not share. A
    decoder-only model reads the text, and what counts is all from the choice on. The inputs of
    an encoder-decoder have a sentinel in the gap, and its targets are the choice between two
    sentinels, as in span corruption; a UL2 run's mode for short spans comes first. An encoder gets
    a row for each of the choice's tokens, in which this and the choice's later tokens are masked,
    so that their likelihoods multiply to the choice's (Kauf and Ivanova 2023, arXiv:2305.10588).
    """

    def __init__(self, run: Run, vocabulary: Vocabulary | None = None):
        """`vocabulary` encodes; None: the one of the run's data."""
        data, model = run.data, run.config.model
        tasks = data.tasks
        self._vocabulary = vocabulary or (tasks[0].vocabulary if tasks else None)
        own = self._vocabulary
        self._encode = (lambda text: own.encode([text])[0].tolist()) if own else data.encode
        self.special = (own or run.converter).special.starting(model.start_id)
        self.longest = model.longest_text or _LONGEST
        objectives = [task.task.objective for task in tasks] or _objectives(run.config)
        self._pieces = next(
            (pieces for objective in objectives if (pieces := objective.pieces)), ()
        )
        self._fill: Callable[[_Cut], list[Filled]] = self._whole
        if model.has_both_stacks:
            if own and own.record.sentinels < 2:
                raise UserError(
                    f"--suite: {own.name} has no sentinels to fill gaps with; a model that was not "
                    "trained by span corruption has no such likelihoods"
                )
            size = own.size if own else data.vocab_size
            self._sentinels = size - 1, size - 2
            self._mode = [self._id(self._pieces[:1])] if self._pieces else []
            self._fill = self._span
        elif not model.has_decoder:
            mask, classify = self._pieces or (None, None)
            self._mask = self._id([mask] if mask else _MASKS)
            self._classify = self._id([classify] if classify else _FIRST)
            self._fill = self._masked

    def __call__(self, question: Question) -> list[list[Filled]]:
        """Returns the rows of each choice; the sum of their counted log likelihoods is its own.

        The second half of a text is filled a few words at a time, each after all before them, by a
        model that has learned to fill short gaps.
        """
        if not question.is_text or self._fill == self._whole:
            return [self._fill(cut) for cut in self._cuts(question)]
        before, words = question.before, words_of(question.right)
        rows: list[Filled] = []
        for first in range(0, len(words), _WORDS):
            part = "".join(words[first : first + _WORDS])
            (cut,) = self._cuts(Question(before, (part.rstrip(),)))
            # Where a part ends is given, so that it needs no sentinel.
            closed = self._fill == self._span
            rows += [row._replace(first=1, end=row.end - 1) if closed else row
                     for row in self._fill(cut)]  # fmt: skip
            before += part
        return [rows]

    def unknown_bytes(self, question: Question) -> int:
        """Returns how many bytes of the right choice have no token but the unknown one."""
        own = self._vocabulary
        if own is None:
            return 0
        ids = own.encode([question.right])[0]
        known = ids[ids != own.special.unk]
        if len(known) == len(ids):
            return 0
        return max(0, len(question.right.encode()) - len(own.decode(known).encode()))

    def _cuts(self, question: Question) -> list[_Cut]:
        before = self._encode(question.before.rstrip())
        after = self._encode(question.after) if question.after else []
        texts = [
            self._encode(question.before + choice + question.after) for choice in question.choices
        ]
        first = min(_common(text, before) for text in texts)
        last = min(min(_common(text[::-1], after[::-1]), len(text) - first) for text in texts)
        return [
            _Cut(text[:first], text[first : len(text) - last], text[len(text) - last :])
            for text in texts
        ]

    def _whole(self, cut: _Cut) -> list[Filled]:
        text = [*cut.before, *cut.span, *cut.after]
        return [_row([], text, len(cut.before), len(text))]

    def _span(self, cut: _Cut) -> list[Filled]:
        first, second = self._sentinels
        inputs = [*self._mode, *cut.before, first, *cut.after, self.special.eos]
        targets = [first, *cut.span, second]
        return [_row(inputs, targets, 0, len(targets))]

    def _masked(self, cut: _Cut) -> list[Filled]:
        text = [self._classify, *cut.before, *cut.span, *cut.after, self.special.eos]
        first = 1 + len(cut.before)
        end = first + len(cut.span)
        return [
            _row([*text[:at], *[self._mask] * (end - at), *text[end:]], text, at, at + 1)
            for at in range(first, end)
        ]

    def fits(self, choices: list[list[Filled]]) -> bool:
        """Returns whether the model has positions for all rows of a question."""
        sides = (side for rows in choices for row in rows for side in (row.inputs, row.targets))
        return max(map(len, sides), default=0) <= self.longest

    def _id(self, pieces: Sequence[str]) -> int:
        """Returns the id of the first of the pieces that the vocabulary has."""
        assert self._vocabulary, "a data set without pieces trains no model that needs them"
        ids = self._vocabulary.ids
        found = (token for piece in pieces if (token := ids.find(piece)) is not None)
        token = next(found, None)
        if token is None:
            raise UserError(f"--suite: the vocabulary has none of {', '.join(pieces)}")
        return token


def _row(inputs: Ids, targets: Ids, first: int, end: int) -> Filled:
    return Filled(np.asarray(inputs, np.int32), np.asarray(targets, np.int32), first, end)


def _common(a: Ids, b: Ids) -> int:
    """Returns how many first tokens are equal."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))


def _objectives(config: Config) -> list[Objective]:
    """Returns the objectives of a run whose caches are gone; none without tasks or with seqio's."""
    if not config.task or config.data_scheme:
        return []
    names = [name for _, spec in mixtures_of(config) for name in spec.names]
    found = [registry.find(name, config.task_module) for name in names]
    return [task.objective for task in found if task]
