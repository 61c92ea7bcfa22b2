"""Runs from gin files as a user starts them."""

import json
import os

import pytest

from tasks.terminal.command_line import UserError
from tests.support.processes import completed
from tests.support.runs import ROOT, TASK, command, curve, state
from tests.support.trees import assert_equal
from trainer.pretrain import main

# A recipe as somebody has it; T5X's own files are not there.
RECIPE = f"""\
from __gin__ import dynamic_registration
import __main__ as train_script
import my_tasks
from t5x import partitioning
from t5x import utils

include 't5x/examples/t5/t5_1_1/tiny.gin'
include 't5x/configs/runs/pretrain.gin'

MIXTURE_OR_TASK_NAME = '{TASK}'
TASK_FEATURE_LENGTHS = {{'inputs': 64, 'targets': 18}}
TRAIN_STEPS = 6
BATCH_SIZE = 4
DROPOUT_RATE = 0.1
RANDOM_SEED = 3
network.T5Config:
  dtype = 'float32'
  mlp_activations = ('relu', 'linear')
train_script.train:
  eval_period = 3
  eval_steps = 2
utils.SaveCheckpointConfig:
  period = 3
  keep = 2
utils.create_learning_rate_scheduler.warmup_steps = 4
"""
FLAGS = (
    *("--preset=t5_1_1_tiny", f"--task={TASK}", "--lengths.inputs=64", "--lengths.targets=18"),
    *("--train_steps=6", "--batch_size=4", "--model.dropout_rate=0.1", "--seed=3"),
    *("--model.mlp_activations=relu,linear", "--model.vocab_size=32128"),
    *("--evaluation.every_steps=3", "--evaluation.batches=2", "--checkpoint.every_steps=3"),
    *("--checkpoint.keep=2", "--optimizer.warmup_steps=4", "--evaluation.batch_size=4"),
)


def pretrain(folder, *flags):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    made = completed(command("trainer.pretrain", *flags), cwd=folder, env=environment)
    assert made.returncode == 0, made.stderr
    return made


@pytest.mark.slow
def test_a_run_from_a_gin_file_equals_the_run_from_flags(text_cache, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.gin").write_text(RECIPE)
    (tmp_path / "my_tasks.py").write_text("raise SystemExit('executed')")
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    files = ("--gin_file=tiny.gin", "--gin_search_paths=elsewhere,recipes")
    common = (f"--cache_dir={text_cache.parent}", "--metrics.every_steps=2")
    result = pretrain(tmp_path, *files, f"--gin.MODEL_DIR='{theirs}'", *common)
    assert "my_tasks (tiny.gin:3): --task_module=my_tasks makes its tasks" in result.stdout
    assert "the order of the data and its noise have no seed" in result.stdout
    pretrain(tmp_path, *FLAGS, f"--model_dir={ours}", *common)
    assert_equal(state(theirs, 6), state(ours, 6))
    assert curve(theirs) == curve(ours)
    validation = [line for line in curve(ours) if line["split"] == "validation"]
    # Two batches of four rows, less than the whole split.
    assert [line["step"] for line in validation] == [3, 6]
    assert validation[0]["metrics"]["tokens"] == 2 * 4 * 14

    written = json.loads((theirs / "config.json").read_text())
    assert written["origins"]["batch_size"] == "tiny.gin:13 via BATCH_SIZE"


def test_a_vocabulary_other_than_the_cache_is_refused(text_cache, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = next(text_cache.parents[1].glob("vocabulary/*.model"))
    (tmp_path / "tiny.gin").write_text(RECIPE)
    # One with a field more, of a number that no reader knows.
    (tmp_path / "other.model").write_bytes(own.read_bytes() + b"\x9a\x06\x00")
    (tmp_path / "text.model").write_text("no model")
    flags = ("--gin_file=tiny.gin", "--gin.MODEL_DIR='model'", "--print_config")
    flags += (f"--cache_dir={text_cache.parent}",)
    for model, says in (
        ("other.model", "differs from the vocabulary of"),
        ("no.model", "no such file"),
        ("text.model", "is not a SentencePiece model"),
    ):
        name = "SentencePieceVocabulary.sentencepiece_model_file"
        with pytest.raises(UserError, match=says):
            main([*flags, f"--gin.{name}='{model}'"])
    assert main([*flags, f"--gin.{name}='{own}'"]) == 0
    remedies = r"set --vocabulary\.extra_ids=0 to train with it, or build .* --extra_ids=100"
    with pytest.raises(UserError, match=rf"^--vocabulary\.extra_ids=100: .*{remedies}"):
        main([*flags, "--gin.SentencePieceVocabulary.extra_ids=100"])
    with pytest.raises(UserError, match=rf"--data\.pack has no effect on --task={TASK}"):
        main([*flags, "--data.pack=false"])
