"""A suite: sets of questions, answered by the likelihoods of what may fill their gaps."""

import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tasks.annexes.questions import scores, sets
from tasks.annexes.questions.question import Question
from tasks.annexes.questions.scores import ACCURACY, BITS, Answered
from tasks.objectives import Lengths
from tasks.terminal import progress
from tasks.terminal.command_line import UserError
from tasks.vocabulary import Vocabulary
from trainer.annexes.suites.filling import Filled, Filling
from trainer.config.evaluation import WATCHED
from trainer.data import features
from trainer.data.run import Run
from trainer.engine import processes
from trainer.engine.program import Program
from trainer.evaluating.evaluation import Results
from trainer.evaluating.likelihood import Likelihood

# Logits of a batch on a device, 1 GB in float32: long rows come in smaller batches.
_LOGITS = 1 << 28
# Nats of a byte of text that only the unknown token stands for: it would have to be spelled out.
_BYTE = 8 * math.log(2)
# Rows are padded to powers of two of at least this many positions: few shapes to compile.
_SHORTEST = 16


class Suite:
    """The sets of a run's `suite.sets`, for its model and vocabulary.

    Construction raises UserError if a set is missing or does not fit the model.
    """

    def __init__(self, run: Run, program: Program, vocabulary: Vocabulary | None = None):
        """`vocabulary` encodes the questions; None: the one of the run's data."""
        config = run.config
        self._config, self._program = config, program
        found = sets.load(config.suite.sets, config.evaluation.examples)  # type: ignore[attr-defined]
        filling = Filling(run, vocabulary)
        self._special = filling.special
        self._questions: list[tuple[str, Question]] = []
        self._rows: list[list[list[Filled]]] = []
        self._unknown: list[int] = []
        for name, questions in found.items():
            self._add(name, questions, filling)
        size = config.evaluation.batch_size or config.batch_size
        any_converter = features.converter(config.model, Lengths(_SHORTEST, _SHORTEST))
        self._parts = program.mesh.size
        self._size = -(-size // self._parts) * self._parts
        self._likelihood = Likelihood(program, any_converter, self._size)

    def check_watched(self) -> None:
        """Raises UserError if the run watches a metric of a set that the suite does not have."""
        known = {f"{name}/{BITS if each.is_text else ACCURACY}" for name, each in self._questions}
        for path in WATCHED:
            watched = operator.attrgetter(path)(self._config) or ""
            parts = watched.rpartition(":")[2].split("/")
            if parts[-1] in (ACCURACY, BITS) and "/".join(parts[-2:]) not in known:
                raise UserError(f"--{path}={watched}: the suite has {', '.join(sorted(known))}")

    def _add(self, name: str, questions: list[Question], filling: Filling) -> None:
        """Adds the questions of a set that the model can answer; says how many it cannot."""
        long, alike = 0, 0
        before = len(self._rows)
        for question in questions:
            rows = filling(question)
            if not filling.fits(rows):
                long += 1
            elif _alike(rows, question.answer):
                alike += 1
            else:
                self._questions.append((name, question))
                self._rows.append(rows)
                self._unknown.append(filling.unknown_bytes(question) if question.is_text else 0)
        reasons = {
            f"longer than the model's {filling.longest:,} positions": long,
            "whose choices the vocabulary cannot tell apart": alike,
        }
        said = "; ".join(f"{count:,} {why}" for why, count in reasons.items() if count)
        if len(self._rows) == before:
            raise UserError(
                f"--suite: {name} has no question for this model ({said}): leave it out"
            )
        if said and processes.is_first():
            left = long + alike
            print(
                f"note: {left:,} of {len(questions):,} questions of {name} are left out: {said}",
                file=sys.stderr,
            )

    def __call__(
        self, params: Any, stopping: Callable[[], bool] = lambda: False
    ) -> list[Answered] | None:
        """Returns all questions with their scores; None if abandoned."""
        params = self._program.merged(params)
        rows = [row for choices in self._rows for some in choices for row in some]
        likelihoods = np.zeros(len(rows))
        shapes: dict[tuple[int, int], list[int]] = {}
        for number, row in enumerate(rows):
            shapes.setdefault(self._shape(row), []).append(number)
        done = 0
        with progress.shown("suite", len(rows)) as bar:
            for (inputs, targets), numbers in sorted(shapes.items()):
                lengths = Lengths(inputs, targets)
                converter = features.converter(self._config.model, lengths, self._special)
                size = self._at_once(max(inputs, targets))
                for first in range(0, len(numbers), size):
                    if stopping():
                        return None
                    some = numbers[first : first + size]
                    pairs = [(rows[number].inputs, rows[number].targets) for number in some]
                    tokens = self._likelihood.of_tokens(params, pairs, converter, size)
                    for number, log_L in zip(some, tokens, strict=True):
                        likelihoods[number] = log_L[rows[number].first : rows[number].end].sum()
                    done += len(some)
                    bar.update(done)
        left = iter(likelihoods.tolist())
        return [
            Answered(
                name,
                question,
                [math.fsum(next(left) for _ in some) - unknown * _BYTE for some in choices],
            )
            for (name, question), choices, unknown in zip(
                self._questions, self._rows, self._unknown, strict=True
            )
        ]

    def _at_once(self, length: int) -> int:
        """Returns the number of rows of this length in a batch."""
        most = _LOGITS // (length * self._config.model.vocab_size) * self._parts
        return max(self._parts, min(self._size, most))

    def _shape(self, row: Filled) -> tuple[int, int]:
        inputs, targets = (_padded(len(each)) for each in (row.inputs, row.targets))
        model = self._config.model
        if not model.has_encoder:
            inputs = 0
        elif not model.has_decoder:
            inputs = targets
        most = model.longest_text
        return (inputs, targets) if most is None else (min(inputs, most), min(targets, most))


class SuiteEvaluation:
    """Answers a run's suite at an evaluation, and writes MODEL_DIR/suite/NAME.jsonl."""

    def __init__(self, run: Run, program: Program):
        self._suite, self._model_dir = Suite(run, program), run.config.model_dir
        self._suite.check_watched()

    def __call__(self, params: Any, name: str, stopping: Callable[[], bool]) -> Results | None:
        """Returns the scores under "suite/SET"; None if abandoned."""
        answered = self._suite(params, stopping)
        if answered is None:
            return None
        if processes.is_first():
            scores.write(scores.path(self._model_dir, name), answered)
        return scores.results(scores.of(answered))


def _alike(choices: list[list[Filled]], answer: int) -> bool:
    """Returns whether a choice has no token, or the right one has the tokens of another."""
    tokens = [
        [(row.inputs.tolist(), row.targets.tolist(), row.first) for row in rows] for rows in choices
    ]
    empty = any(not sum(row.end - row.first for row in rows) for rows in choices)
    return empty or tokens.count(tokens[answer]) > 1


def _padded(length: int) -> int:
    return max(_SHORTEST, 1 << (length - 1).bit_length() if length else 0)
