"""Conversions keep the decoder's start, EOS and padding that a transformers folder names."""

import json

import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.huggingface.test_special_ids import START, changed, written
from trainer.annexes.conversion import convert
from trainer.config import load_config
from trainer.huggingface import special_ids

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("special") / "t5")


def test_another_eos_is_refused(folder, text_cache, tmp_path):
    for name in ("config.json", "generation_config.json"):
        copy = changed(folder, tmp_path, name, eos_token_id=[7, 9])
    vocabulary = f"--vocabulary={text_cache.parent.parent}/vocabulary"
    flags = [f"--from={copy}", f"--to={tmp_path}/to", "--format=huggingface", vocabulary]
    with pytest.raises(UserError, match=r"eos_token_id is 7, 9, but EOS of .* is 1: name the fold"):
        convert.main(flags)


def test_conversions_write_back_what_they_read(folder, tmp_path, capsys):
    ids = {"decoder_start_token_id": START, "eos_token_id": 9, "pad_token_id": 3}
    copy = changed(folder, tmp_path, "config.json", **ids)
    copy = changed(folder, tmp_path, "generation_config.json", **ids | {"eos_token_id": [7, 9]})
    places = [copy, tmp_path / "back", tmp_path / "run", tmp_path / "again"]
    formats = ["huggingface", "palimpsest", "huggingface"]
    for number, format in enumerate(formats):
        flags = [f"--from={places[number]}", f"--to={places[number + 1]}", f"--format={format}"]
        assert not convert.main(flags)
    for path in (tmp_path / "back", tmp_path / "again" / "checkpoint_0"):
        stored = [
            json.loads((path / name).read_text())
            for name in ("config.json", special_ids.GENERATION)
        ]
        assert [each["eos_token_id"] for each in stored] == [9, [7, 9]]
        for each in stored:
            assert (each["decoder_start_token_id"], each["pad_token_id"]) == (START, 3)
    assert load_config(str(tmp_path / "run"))[0].model.start_id == START
    with pytest.raises(UserError, match="start_id=5: T5X's decoders begin with id 0"):
        convert.main([f"--from={copy}", f"--to={tmp_path}/t5x", "--format=t5x"])


def test_a_decoder_keeps_its_ids_and_gets_no_others(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    ids = {"bos_token_id": 199, "eos_token_id": [200, 201]}
    config = LlamaConfig(vocab_size=384, num_attention_heads=4, **sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    assert not convert.main(
        [f"--from={tmp_path}/llama", f"--to={tmp_path}/back", "--format=huggingface"]
    )
    for name in ("config.json", special_ids.GENERATION):
        stored = json.loads((tmp_path / "back" / name).read_text())
        assert {n: stored[n] for n in special_ids.NAMES if n in stored} == ids
