"""Tasks are recorded with their run, and changes of the task module are named."""

import importlib
import json
import math
import shutil
import sys
import types

import pytest

from tasks.terminal.command_line import UserError
from tasks.vocabulary import EOS_ID, UNK_ID
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.config.from_flags import build_config
from trainer.data import task_record
from trainer.setup import prepare

MODULE = """
import dataclasses
import numpy as np
from tasks.mixture import MixtureSpec
from tasks.objectives import AutoregressiveLM, Lengths, span_corruption
from tasks.task import TaskSpec

@dataclasses.dataclass(frozen=True)
class Mine(AutoregressiveLM):
    def examples(self, tokens_WN, lengths_W, keys_W, lengths, ids):
        tokens_WN = {tokens}
        return super().examples(tokens_WN, lengths_W, keys_W + {shift}, lengths, ids){reversed}

CORPUS = "text:none"
TASKS = (
    TaskSpec("my_spans", CORPUS, span_corruption({density}, 3), Lengths(64, 40)),
    TaskSpec("my_others", CORPUS, span_corruption(0.15, 3), Lengths(64, 40)),
    TaskSpec("my_lm", CORPUS, Mine(), Lengths(0, 40)),
)
MIXTURES = (MixtureSpec("mine", (("my_spans", {rate}), ("my_others", 0.5))),)
"""
AS_IT_WAS = {"density": 0.15, "rate": 0.5, "shift": 0, "reversed": "", "tokens": "tokens_WN"}


@pytest.fixture
def run_of(text_cache, tmp_path, monkeypatch):
    """Returns a function that prepares a run on a task module with given contents."""
    (tmp_path / "code").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    name = f"tasks_{tmp_path.name}".replace("-", "_")

    def prepared(task, *flags, **contents):
        path = tmp_path / "code" / f"{name}.py"
        path.write_text(MODULE.format(**{**AS_IT_WAS, **contents}))
        sys.modules.pop(name, None)
        shutil.rmtree(tmp_path / "code" / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        preset = "lm_tiny" if task == "my_lm" else "t5_1_1_tiny"
        arguments = [f"--task={task}", f"--cache_dir={text_cache}", f"--model_dir={tmp_path}/model"]
        flags = [*arguments, f"--task_module={name}", "--batch_size=4", *flags]
        run = prepare(*build_config(preset, flags))
        assert run.data.record["rates"]  # while the module is as written
        return run

    yield prepared
    sys.modules.pop(name, None)


def changed(before, now, step=5):
    # Through JSON, as checkpoints and config.json hold it.
    return task_record.changes(json.loads(json.dumps(before.data.record)), now.data.record, step)


def test_changes_of_a_task_are_named(run_of):
    assert changed(run_of("my_spans"), run_of("my_spans")) == []
    assert changed(run_of("my_lm"), run_of("my_lm")) == []
    found = changed(run_of("my_spans"), run_of("my_spans", density=0.3))
    assert "objective of my_spans: mask.noise_density was 0.15, is 0.3" in found
    assert any(text.startswith("window_tokens of my_spans was") for text in found)
    assert not any("sha256" in text for text in found)


def test_changed_code_of_an_objective_is_noticed(run_of):
    # The keys do not matter to a language model, so this is the same objective.
    assert changed(run_of("my_lm"), run_of("my_lm", shift=1)) == []
    weights = {"reversed": " | {'weights': (tokens_WN[:, :1], lengths_W * 0 + 1)}"}
    # Probes hold separators and unknown tokens, as windows do.
    tokens = [{"tokens": f"np.where(tokens_WN == {id}, 7, tokens_WN)"} for id in (EOS_ID, UNK_ID)]
    for contents in (weights, *tokens):
        assert changed(run_of("my_lm"), run_of("my_lm", **contents)) == [
            "the objective of my_lm makes different examples because its code has changed"
        ]


def test_changed_rates_of_a_named_mixture_are_named_unless_ahead(run_of):
    (text,) = changed(run_of("mine"), run_of("mine", rate=1.5))
    assert "my_spans 50.0000%, my_others 50.0000%, now my_spans 75.0000%, my_others 25" in text
    # Rows that are due at the same time come in the order of the tasks.
    before = run_of("mine").data.record
    now = {**before, "rates": [[0, before["rates"][0][1][::-1]]]}
    assert "the rates of the tasks were" in task_record.changes(before, now, step=5)[0]
    before, later = run_of("mine"), run_of("mine", "--mixing.schedule=7: my_others=1")
    assert changed(before, later, step=7) == []
    assert "my_others 100.0000% from update 8 on" in changed(before, later, step=8)[0]


def test_a_checkpoint_is_resumed_by_the_same_tasks_alone(run_of, tmp_path, capsys):
    from tests.trainer.checkpoints.test_checkpoint import STATE

    run = run_of("my_spans")
    checkpoints = Checkpoints(str(tmp_path / "model"), run.config.checkpoint)
    checkpoints.save(1, STATE, run)
    checkpoints.close()
    checkpoints = Checkpoints(str(tmp_path / "model"), run.config.checkpoint)
    checkpoints.check_resumable(1, run_of("my_spans"))
    assert not capsys.readouterr().out
    with pytest.raises(UserError, match=r"objective of my_spans: mask\.noise_density was 0\.15"):
        checkpoints.check_resumable(1, run_of("my_spans", density=0.3))
    checkpoints.close()


def test_any_setting_has_a_plain_form():
    class Odd:
        def __init__(self):
            self.size, self.function, self.more = 3, len, {"a": (1, None)}
            self.number, self.me = math.nan, self

    assert task_record.plain(Odd()) == {
        **{"class": Odd.__qualname__, "function": "len", "more": {"a": [1, None]}, "size": 3},
        **{"number": "nan", "me": Odd.__qualname__},
    }
    assert json.dumps(task_record.plain(types.SimpleNamespace(x=Odd)))


@pytest.mark.parametrize("spoil", ["flip", "delete"])
def test_a_damaged_vocabulary_of_a_cache_is_named(text_cache, tmp_path, spoil):
    folder = shutil.copytree(text_cache, tmp_path / "cache")
    path = folder / "sentencepiece.model"
    if spoil == "delete":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    flags = ["--task=python_docs_span_corruption", f"--cache_dir={folder}", "--model_dir=none"]
    with pytest.raises(UserError, match=r"sentencepiece\.model is .*run pipeline\.build again"):
        prepare(*build_config("t5_1_1_tiny", flags))
