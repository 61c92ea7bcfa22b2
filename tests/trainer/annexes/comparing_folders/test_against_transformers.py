"""--init_from=hf: compares logits with transformers before the first update."""

import json
import pathlib
import subprocess

import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import flags_of
from tests.trainer.huggingface.conftest import Exported
from trainer import pretrain
from trainer.annexes.comparing_folders import against_transformers
from trainer.huggingface import folder_parity


@pytest.fixture
def folder(tmp_path):
    return str(Exported("llama", tmp_path / "llama").folder)


@pytest.mark.torch
def test_equal_logits_are_said(folder):
    text = against_transformers.compared(f"hf:{folder}")
    assert text.startswith("logits are those of transformers: largest difference ")


@pytest.mark.torch
def test_logits_of_a_head_of_zeros_tell_nothing(folder):
    numpy = pytest.importorskip("safetensors.numpy")
    path = pathlib.Path(folder, "model.safetensors")
    arrays = numpy.load_file(path)
    arrays["lm_head.weight"] *= 0
    numpy.save_file(arrays, path, {"format": "pt"})
    text = against_transformers.compared(f"hf:{folder}")
    assert text.startswith("logits were not compared: they are the same for all tokens")


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


@pytest.mark.torch
@pytest.mark.processes
def test_a_run_says_it_once(text_cache, tmp_path, capsys):
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 1}
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    made = T5ForConditionalGeneration(T5Config(vocab_size=32_128, **sizes, **ids))
    made.save_pretrained(tmp_path / "t5")
    for steps, count in ((1, 1), (2, 0)):
        flags = flags_of(text_cache, tmp_path / "run", f"--init_from=hf:{tmp_path}/t5")
        quiet = ("--metrics.tensorboard=false", "--evaluation.every_steps=0")
        assert pretrain.main([*flags, f"--train_steps={steps}", *quiet]) == 0
        said = capsys.readouterr()
        assert (said.out + said.err).count("logits are those of transformers") == count
