"""Probes: the user's own texts and questions, scored at every evaluation.

A line of the file is {"text": …}, for perplexity, or {"cloze": "The {} barks.", "choices": ["dog",
"house"], "answer": 0}; the answer should be the most likely choice.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tasks.storage import files
from tasks.terminal.command_line import UserError
from trainer.data.interface import Run
from trainer.engine.metrics import perplexity
from trainer.engine.program import Program
from trainer.evaluating.likelihood import Likelihood

# The name of the probes' metrics, in place of a split's.
PROBES = "probes"
_GAP = "{}"
_KINDS = 'give {"text": …} or {"cloze": "… {} …", "choices": […], "answer": 0}'

# Ids of (inputs, targets).
Pair = tuple[np.ndarray, np.ndarray]


class _Probe(NamedTuple):
    """Pairs to score: one for a text, one per choice for a cloze."""

    pairs: list[Pair]
    answer: int | None


class Probes:
    """The probes of `evaluation.probes`.

    A decoder-only model scores the whole text for each choice. An encoder-decoder model fills a
    span, as in pretraining: the gap of a cloze, or the second half of a text's words. Construction
    raises UserError if the file is missing or a line is not a probe.
    """

    def __init__(self, run: Run, program: Program):
        path = run.config.evaluation.probes
        assert path is not None
        size = run.config.evaluation.batch_size or run.config.batch_size
        self._program = program
        self._likelihood = Likelihood(program, run.converter, size)
        encodes = run.config.model.architecture == "encoder_decoder"
        make = _Spans(run) if encodes else _Whole(run)
        self._probes = [_probe(line, place, make) for place, line in _lines(path)]

    def __call__(self, params: Any) -> dict[str, dict[str, float]]:
        """Returns {"probes": {`probe_accuracy` in percent, `probe_perplexity` per token}}."""
        params = self._program.merged(params)
        pairs = [pair for probe in self._probes for pair in probe.pairs]
        scores = iter(self._likelihood(params, pairs).tolist())
        right: list[bool] = []
        nats, tokens = 0.0, 0
        for probe in self._probes:
            found = [next(scores) for _ in probe.pairs]
            if probe.answer is None:
                nats, tokens = nats - found[0], tokens + len(probe.pairs[0][1])
            else:
                right.append(int(np.argmax(found)) == probe.answer)
        values = {}
        if right:
            values["probe_accuracy"] = 100 * math.fsum(right) / len(right)
        if tokens:
            values["probe_perplexity"] = perplexity(nats / tokens)
        return {PROBES: values}


class _Whole:
    """Pairs for a decoder-only model: no inputs, and the whole text as targets."""

    def __init__(self, run: Run):
        self._encode, self._length = run.data.encode, run.lengths.inputs + run.lengths.targets

    def text(self, text: str) -> Pair:
        return np.zeros(0, np.int32), _fitting(self._encode(text), self._length, text)

    def choice(self, before: str, choice: str, after: str) -> Pair:
        return self.text(before + choice + after)


class _Spans:
    """Pairs for an encoder-decoder model: the text with a sentinel for a span, and the span."""

    def __init__(self, run: Run):
        self._encode, self._lengths = run.data.encode, run.lengths
        self._eos = run.converter.special.eos
        self._sentinels = [run.data.vocab_size - 1, run.data.vocab_size - 2]

    def text(self, text: str) -> Pair:
        words = text.split()
        half = len(words) // 2
        return self.choice(" ".join(words[:half]) + " ", " ".join(words[half:]), "")

    def choice(self, before: str, choice: str, after: str) -> Pair:
        (first, second), eos = self._sentinels, self._eos
        inputs = [*self._encode(before), first, *self._encode(after), eos]
        targets = [first, *self._encode(choice), second, eos]
        whole = before + choice + after
        return (
            _fitting(inputs, self._lengths.inputs, whole),
            _fitting(targets, self._lengths.targets, whole),
        )


def _fitting(ids: Sequence[int], length: int, text: str) -> np.ndarray:
    if len(ids) > length:
        raise UserError(
            f"--evaluation.probes: {text[:60]!r} has {len(ids)} tokens, rows have {length}: cut it"
        )
    return np.asarray(ids, np.int32)


def _lines(path: str) -> list[tuple[str, dict[str, Any]]]:
    if not files.exists(path):
        raise UserError(f"--evaluation.probes={path}: no such file")
    found = []
    for number, text in enumerate(files.read_lines(path), 1):
        place = f"--evaluation.probes={path}, line {number}"
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            raise UserError(f"{place}: this is not JSON; {_KINDS}") from error
        if not isinstance(value, dict):
            raise UserError(f"{place}: {_KINDS}")
        found.append((place, value))
    if not found:
        raise UserError(f"--evaluation.probes={path} has no probes; {_KINDS}")
    return found


def _probe(value: dict[str, Any], place: str, make: _Whole | _Spans) -> _Probe:
    if isinstance(value.get("text"), str) and value["text"].strip():
        return _Probe([make.text(value["text"])], None)
    cloze, choices, answer = (value.get(name) for name in ("cloze", "choices", "answer"))
    if not isinstance(cloze, str) or not isinstance(choices, list) or cloze.count(_GAP) != 1:
        raise UserError(f"{place}: {_KINDS}")
    if not isinstance(answer, int) or not 0 <= answer < len(choices) or len(choices) < 2:
        raise UserError(f"{place}: answer must be the index, from 0, of one of two or more choices")
    before, _, after = cloze.partition(_GAP)
    return _Probe([make.choice(before, str(each), after) for each in choices], answer)
