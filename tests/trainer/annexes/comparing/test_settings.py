"""What a different setting changes in a run."""

import pytest

from tasks.terminal import foreign_flags
from trainer.annexes.comparing import settings
from trainer.config.from_flags import build_config


def build(*flags):
    return build_config("t5_1_1_tiny", flags)[0]


@pytest.mark.parametrize("watch", ["plateau", "stopping"])
def test_a_watch_makes_evaluations_matter(watch):
    every = ("--evaluation.every_steps=2", "--evaluation.metrics=bleu")
    few = ("--evaluation.batches=1", "--evaluation.examples=3")
    watched = build(*every, *few, f"--{watch}.metric=min:python_docs/loss")
    assert settings.effect("evaluation.batches", False, watched) == settings.RESULTS
    assert settings.effect("evaluation.batches", False, build(*every)) == settings.NONE


def test_dropout_makes_parts_of_a_batch_matter():
    dropping = build("--model.dropout_rate=0.1")
    assert settings.effect("microbatches", False, dropping) == settings.RESULTS
    assert settings.effect("microbatches", False, build()) == settings.ROUNDING


def test_runs_that_are_named_by_a_flag_get_an_answer():
    assert "RUN_A RUN_B" in foreign_flags.hint("--model_dir", ["run_a", "run_b"])
