"""A user's own objective, in a task module of their own, works from the cache to the batches."""

import re

import numpy as np
import pytest

from pipeline import build
from tasks import registry
from tasks.objectives import Lengths, Objective
from tasks.task import TaskSpec
from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID
from tests.support.extending import example
from tests.support.small_tokenizers import t5
from trainer.config.from_flags import build_config
from trainer.setup import prepare

# All that a user writes: one file.
MODULE = example("An objective")
NAME = "my_continuation"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with the module, and a small cache of its task in "cache"."""
    folder = tmp_path_factory.mktemp("new_objective")
    (folder / "continuation_tasks.py").write_text(MODULE)
    lines = [f"line {n} says that {n} times {n} is {n * n}, and no more" for n in range(400)]
    (folder / "train.txt").write_text("\n".join(lines[40:]))
    (folder / "validation.txt").write_text("\n".join(lines[:40]))
    t5(folder / "words", lines, 80)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        build.main(
            [
                *(f"--task={NAME}", "--task_module=continuation_tasks"),
                f"--corpus=text:{folder}/*.txt?split=train",
                *(f"--vocabulary={folder}/words.model", f"--cache_dir={folder}/cache"),
            ]
        )
    return folder


@pytest.fixture
def prepared(folder, monkeypatch):
    """Returns a function: a preset and flags -> the run of the task."""
    monkeypatch.chdir(folder)

    def run(preset, *flags):
        given = [f"--task={NAME}", "--task_module=continuation_tasks", "--model_dir=none"]
        given += [f"--cache_dir={folder}/cache", "--batch_size=4", *flags]
        return prepare(*build_config(preset, given))

    return run


def test_batches_are_made_from_its_examples(prepared):
    data = prepared("t5_1_1_tiny").data
    batch = data.batches()[0]
    windows_W = data.batches().places(0).windows
    tokens_WN, _ = data.sources[0].maker.windows.read(windows_W)
    assert tokens_WN.shape == (4, 39)
    np.testing.assert_array_equal(batch["encoder_input_tokens"][:, :24], tokens_WN[:, :24])
    np.testing.assert_array_equal(batch["decoder_target_tokens"][:, :15], tokens_WN[:, 24:])
    assert (batch["encoder_input_tokens"][:, 24] == EOS_ID).all()
    assert (batch["decoder_target_tokens"][:, 15] == EOS_ID).all()


def test_bits_per_byte_count_the_text_that_it_predicts(prepared):
    data = prepared("t5_1_1_tiny").data
    (each,) = data.tasks
    assert each.task.objective.codes_text
    (rows,) = data.evaluation("validation", 4)
    weights_WL = np.concatenate([batch["decoder_loss_weights"] for batch in rows.iterate()])
    windows = data.maker(each, "validation", keep_tails=True).windows
    _, lengths_W = windows.read(np.arange(len(windows)))
    targets = weights_WL.sum() - each.task.objective.appends_eos * weights_WL.any(axis=1).sum()
    assert targets == np.maximum(lengths_W - 24, 0).sum() > 100


def test_its_settings_are_flags_and_words(prepared):
    task = registry.get(NAME, "continuation_tasks")
    assert task.objective.describe(np.uint64(0)) == "continuation (given 24)"
    objective = prepared("t5_1_1_tiny", "--objective=given=20").data.tasks[0].task.objective
    assert objective.given == 20
    assert objective.describe(np.uint64(0)) == "continuation (given 20)"


def test_models_that_cannot_train_on_it_are_rejected(prepared):
    assert prepared("lm_tiny").data.tasks[0].task.objective.architectures == (
        "encoder_decoder",
        "decoder",
    )
    with pytest.raises(UserError, match=re.escape("choose an encoder-decoder preset")):
        prepared("bert_tiny")


def test_an_objective_must_be_a_complete_subclass():
    class Incomplete(Objective):
        features = ("targets",)

    with pytest.raises(TypeError, match=r"abstract methods? .*examples"):
        Incomplete()
    with pytest.raises(UserError, match=r"a str, which must be a subclass of .*Objective"):
        TaskSpec("my_task", "python_docs", "span_corruption", Lengths(32, 16))
