"""--init_from=hf: compares logits with transformers before the first update."""

import json
import pathlib
import subprocess

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.huggingface.conftest import Exported
from trainer.huggingface import folder_parity
from trainer.starting import against_transformers


@pytest.fixture
def folder(tmp_path):
    return str(Exported("llama", tmp_path / "llama").folder)


@pytest.mark.torch
def test_equal_logits_are_said(folder):
    text = against_transformers.compared(f"hf:{folder}")
    assert text.startswith("logits are those of transformers: largest difference ")


@pytest.mark.torch
def test_a_class_with_other_heads_is_said(folder):
    path = pathlib.Path(folder, "config.json")
    written = {**json.loads(path.read_text()), "architectures": ["LlamaModel"]}
    path.write_text(json.dumps(written))
    text = against_transformers.compared(f"hf:{folder}")
    assert text.endswith("is a LlamaModel, not a LlamaForCausalLM")


@pytest.mark.torch
def test_a_model_too_large_for_the_memory_is_not_compared(folder, monkeypatch):
    monkeypatch.setattr(against_transformers, "_free_bytes", lambda: 1e5)
    text = against_transformers.compared(f"hf:{folder}")
    assert text.startswith("logits were not compared: its parameters take 0.0 GB in float32, more")


@pytest.mark.torch
def test_other_logits_are_refused_in_one_line(folder, monkeypatch):
    def other(*words, **settings):
        return subprocess.CompletedProcess(words, 3, "a line\nlogits differ; nothing was written\n")

    monkeypatch.setattr(subprocess, "run", other)
    with pytest.raises(UserError, match=r"^--init_from=hf:\S+: logits differ: the folder would"):
        against_transformers.compared(f"hf:{folder}")


def test_other_logits_end_the_process_with_a_code_of_their_own(folder, monkeypatch, capsys):
    def differ(*_):
        raise folder_parity.NotEqual("transformers computes different logits")

    monkeypatch.setattr(folder_parity, "logits", differ)
    monkeypatch.setattr("sys.argv", ["", folder])
    with pytest.raises(SystemExit, match="3"):
        against_transformers.main()
    assert capsys.readouterr().out.endswith("transformers computes different logits\n")


def test_without_transformers_a_line_says_so(folder):
    text = against_transformers.compared(f"hf:{folder}")
    assert text == "logits were not compared: the package torch is not installed"
