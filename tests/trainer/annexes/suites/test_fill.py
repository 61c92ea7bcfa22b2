"""`palimpsest fill` on a run with initial parameters."""

import json

import numpy as np
import pytest

from tasks import vocabulary
from tasks.terminal.command_line import UserError
from tasks.vocabulary import encode_with_sentinels
from tests.trainer.test_generate import run as run
from tests.trainer.test_generate import spm as spm
from trainer.annexes.suites import fill
from trainer.decoding.decoder import Decoded
from trainer.inference.generator import Generator

pytestmark = pytest.mark.processes  # whole runs


def test_fill_shows_spans_in_their_places(run, spm, capsys, monkeypatch):
    def sentinel(number):
        return [spm.size - 1 - number]

    # A tiny model without training fills nothing sensible: its output is replaced.
    first, second = (spm.encode([words])[0].tolist() for words in ("a list", "the end"))
    ids = np.array(sentinel(0) + first + sentinel(1) + second + sentinel(2) + first)

    def found(self, prompts, example_ids=None):
        expected = encode_with_sentinels(spm, "It is <extra_id_0> at <extra_id_1>.").tolist()
        assert prompts[0].tolist() == [*expected, vocabulary.EOS_ID]
        return [Decoded(ids, 0.0, True)]

    monkeypatch.setattr(Generator, "__call__", found)
    with pytest.raises(UserError, match="has no gap"):
        fill.main(["no gap", f"--model_dir={run}"])
    fill.main(["It is <extra_id_0> at <extra_id_1>.", f"--model_dir={run}"])
    assert capsys.readouterr().out == "It is [a list] at [the end].\n"


QUESTIONS = [
    {"cloze": "It is {} here.", "choices": ["the end", "old"], "answer": 0},
    {"cloze": "A {} of it.", "choices": ["list", "new"], "answer": 0},
    {"cloze": "See {} list.", "choices": ["old", "the"], "answer": 1},
    {"cloze": "Not {} list.", "choices": ["old", "the"], "answer": 1},
]


def test_gaps_of_questions_are_counted_and_the_surest_is_shown(
    run, spm, capsys, monkeypatch, tmp_path
):
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(each) + "\n" for each in QUESTIONS))
    made = []

    def found(self, prompts, example_ids=None):
        made.append(self)
        for prompt, each in zip(prompts, QUESTIONS, strict=True):
            text = each["cloze"].replace("{}", "<extra_id_0>")
            expected = encode_with_sentinels(spm, text).tolist()
            assert prompt.tolist() == [*expected, vocabulary.EOS_ID]
        words = (("the end", -2.0), ("list", -1.0), ("the old", -0.5), ("list", -0.1))
        return [
            # What comes after EOS is no part of an answer.
            Decoded(np.array([spm.size - 1, *spm.encode([text])[0], 1, 9]), score, True)
            for text, score in words
        ]

    monkeypatch.setattr(Generator, "__call__", found)
    fill.main([f"--questions={tmp_path}/mine.jsonl", f"--model_dir={run}"])
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "gaps filled      4", "rightly          2, 50.0% [15.0, 85.0]",
        "always [the]     2, 50.0%", "", "A [list] of it.",
    ]  # fmt: skip
    # The words end where the next span begins.
    assert made[0].decoder._decoding.eos_id == spm.size - 2


def test_questions_that_cannot_be_filled_are_refused(run, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"text": "Only a text without any gap."}\n')
    questions = f"--questions={tmp_path}/mine.jsonl"
    for flags, says in (
        ([questions], "no gaps to fill, only texts"),
        ([questions, "A <extra_id_0>"], "give a text with gaps, or --questions"),
        ([], "give a text with gaps, or --questions"),
        (["--questions=nowhere"], "--questions=nowhere: no such suite"),
        ([questions, "--method=beam", "--num_return_sequences=2"], "compares one answer"),
    ):
        with pytest.raises(UserError, match=says):
            fill.main([f"--model_dir={run}", *flags])
