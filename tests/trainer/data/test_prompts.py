"""Prompts are read in predictions as they are by `trainer.generate`, and as in training."""

import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import run_of
from trainer.data.prompts import prompt_form
from trainer.engine.program import Program
from trainer.evaluating.predictions import Predicting

PREDICTED = ("--evaluation.metrics=exact_match", "--evaluation.decoding.max_new_tokens=4")


@pytest.mark.parametrize(
    ("task", "prefix"),
    [("python_docs_decoder_prefix_lm", True), ("python_docs_autoregressive_lm", False)],
)
def test_a_prefix_is_read_both_ways(task, prefix, text_cache):
    run = run_of(text_cache, *PREDICTED, task=task, preset="lm_tiny", lengths=(0, 60))
    assert prompt_form(run) == (False, prefix)
    decoder = Predicting(run, "validation", Program(run))._decoder
    assert bool(decoder and decoder._decoding.prefix) == prefix


def test_new_tokens_that_leave_no_room_for_a_prompt_are_refused(text_cache):
    flags = ("--model.position=absolute", "--model.max_positions=60", PREDICTED[0])
    task = "python_docs_decoder_prefix_lm"
    run = run_of(text_cache, *flags, task=task, preset="lm_tiny", lengths=(0, 60))
    with pytest.raises(UserError, match=r"max_new_tokens=60: all of the model's 60 positions"):
        Predicting(run, "validation", Program(run))
