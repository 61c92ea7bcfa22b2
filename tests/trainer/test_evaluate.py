"""The table of trainer.evaluate, and how evaluations of one run are kept together."""

import pytest

from tasks.storage import files
from tasks.terminal.command_line import UserError
from tests.trainer.huggingface.test_export import save_run
from trainer import evaluate
from trainer.checkpoints import metadata
from trainer.evaluating import whole_splits
from trainer.reporting.evaluations import evaluation_table

ROW = {"loss": 1.0, "perplexity": 2.7, "accuracy": 0.5, "unigram_entropy": 3.0}


def test_a_new_evaluation_replaces_that_of_the_same_step_and_split():
    before = {
        "9": {"validation": {"loss": 1.0}, "validation/gone": {"loss": 2.0},
            "train": {"loss": 3.0}},
        "10": {"validation": {"loss": 4.0}},
    }  # fmt: skip
    merged = whole_splits.merged(before, {9: {"validation": {"loss": 5.0}}}, "validation")
    assert list(merged) == ["9", "10"]
    assert merged == {
        "9": {"train": {"loss": 3.0}, "validation": {"loss": 5.0}},
        "10": {"validation": {"loss": 4.0}},
    }
    merged = whole_splits.merged(merged, {10: {"train": {"loss": 6.0}}}, "train")
    assert merged["10"] == {"validation": {"loss": 4.0}, "train": {"loss": 6.0}}


def test_a_suite_keeps_other_sets_of_the_same_step():
    before = {"9": {"suite/a": {"x": 1.0}, "suite/b": {"x": 2.0}, "validation": {"loss": 1.0}}}
    merged = whole_splits.merged(before, {9: {"suite/b": {"x": 3.0}}}, None)
    assert merged["9"] == before["9"] | {"suite/b": {"x": 3.0}}


def test_another_split_is_named_in_the_table():
    assert "split" not in evaluation_table({5: {"validation": ROW}})
    header, row = evaluation_table({5: {"train": ROW}}).splitlines()
    assert header.split()[:2] == ["step", "split"]
    assert row.split()[:2] == ["5", "train"]


def test_another_vocabulary_is_refused(text_cache, tmp_path):
    run = save_run(text_cache, tmp_path / "t5", "t5_1_1_tiny", "--lengths.inputs=64")
    (checkpoint,) = (tmp_path / "t5").glob("checkpoint_*")
    metadata.update(str(checkpoint), vocabulary_sha256="0" * 64)
    with pytest.raises(UserError, match="was trained with a different vocabulary from python_"):
        evaluate.main([f"--model_dir={run}"])


@pytest.mark.processes
def test_the_whole_split_is_read_whatever_the_run_evaluated(text_cache, tmp_path):
    flags = ("--lengths.inputs=64", "--evaluation.every_steps=1")
    found = []
    for name, own in {
        "whole": (),
        "watched": (
            "--evaluation.batches=1",
            "--plateau.metric=accuracy",
            "--stopping.metric=loss",
        ),
    }.items():
        run = save_run(text_cache, tmp_path / name, "t5_1_1_tiny", *flags, *own)
        evaluate.main([f"--model_dir={run}", "--batch_size=8"])
        found.append(files.read_json(f"{run}/evaluation.json"))
    assert found[0] == found[1]
