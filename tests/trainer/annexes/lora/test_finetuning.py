"""LoRA in a fine-tuning: resumed, exported and started from."""

import shutil

import pytest

from tests.support.runs import command, done, state
from tests.support.trees import assert_close, assert_equal
from tests.trainer.test_finetune import STEPS, finetune, pairs, pretrained  # noqa: F401
from trainer.checkpoints import stored
from trainer.inference import trained_run
from trainer.model.paths import named


@pytest.mark.slow
@pytest.mark.torch
def test_a_run_resumes_and_its_export_has_the_same_logits(pretrained, pairs, tmp_path):  # noqa: F811
    flags = ("--lora.rank=2", "--evaluation.every_steps=0", "--checkpoint.best_metric=None")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    made = done(finetune(pretrained, pairs, whole, *flags))
    assert "LoRA of rank 2 on " in made.stdout
    source = shutil.copytree(pretrained, tmp_path / "source")
    done(finetune(source, pairs, broken, *flags, "--train_steps=4"))
    shutil.rmtree(source)
    made = done(finetune(source, pairs, broken, *flags))
    assert "resumes from checkpoint 4" in made.stdout
    assert_equal(state(broken, STEPS), state(whole, STEPS))
    done(command("trainer.export", f"--model_dir={whole}", f"--output={tmp_path}/exported"))
    third = tmp_path / "third"
    done(finetune(whole, pairs, third, "--train_steps=1", "--optimizer.learning_rate=1e-30"))
    opened = trained_run.open_run(str(whole))
    sums = trained_run.restore(opened, None, trained_run.vocabulary_of(opened, None))[1]
    found = {name: each.whole() for name, each in stored.load(str(third)).parameters.items()}
    assert_close(found, named(sums), rtol=1e-5, atol=1e-7)
