"""The decoder's start, EOS and padding that a transformers folder names are used or refused."""

import json

import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tasks.terminal.flags import made, parse
from tests.support.runs import flags_of
from trainer import huggingface
from trainer.config.from_flags import RunFlags, configured
from trainer.decoding.decoder import Decoder, Decoding
from trainer.initialization import init_from
from trainer.setup import prepare

pytestmark = pytest.mark.torch

START, EOS, PAD = 5, 1, 0


def written(path):
    """Writes a folder with a small T5 whose decoder begins with id 5, and returns it."""
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        **{"vocab_size": 32_128, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64},
        **{"num_layers": 1},
        **{"decoder_start_token_id": START, "eos_token_id": EOS, "pad_token_id": PAD},
    )
    T5ForConditionalGeneration(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return written(tmp_path_factory.mktemp("special") / "t5")


def changed(folder, tmp_path, name, **fields):
    """Returns a copy of the folder with fields of the file `name` set, or removed if None."""
    copy = tmp_path / "changed"
    copy.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if not (copy / path.name).exists():
            (copy / path.name).write_bytes(path.read_bytes())
    found = json.loads((copy / name).read_text()) | fields
    (copy / name).write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
    return copy


def test_generated_ids_are_those_of_transformers(folder):
    import torch
    from transformers import T5ForConditionalGeneration

    config = huggingface.model_config(str(folder))
    assert config.start_id == START
    params = huggingface.load(str(folder), config)
    prompt = np.array([17, 300, 41, EOS])
    (found,) = Decoder(config, Decoding(max_new_tokens=6))(params, [prompt])
    theirs = T5ForConditionalGeneration.from_pretrained(folder)
    ids = theirs.generate(torch.from_numpy(prompt)[None], max_new_tokens=6, do_sample=False)
    assert ids[0, 0] == START
    assert found.ids.tolist() == ids[0, 1:].tolist()


def prepared(text_cache, folder):
    flags = flags_of(text_cache, "nowhere", f"--init_from=hf:{folder}")
    return prepare(*configured(made(RunFlags, parse(RunFlags, flags))))


def test_a_run_begins_its_targets_with_the_folder_s_id(folder, text_cache):
    run = prepared(text_cache, folder)
    batch = next(iter(run.data.training(0)))
    assert (batch["decoder_input_tokens"][:, 0] == START).all()
    init_from.start(run)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("generation_config.json", {"decoder_start_token_id": 0}, "start_token_id is 5, but gener"),
        ("config.json", {"decoder_start_token_id": "5"}, "token_id is .5.: it must be an id"),
    ],
)
def test_ids_that_cannot_be_used_are_named(folder, tmp_path, name, fields, message):
    copy = changed(folder, tmp_path, name, **fields)
    with pytest.raises(UserError, match=message):
        huggingface.model_config(str(copy))


def test_a_start_beyond_the_embedding_is_refused(folder, tmp_path):
    copy = changed(folder, tmp_path, "config.json", decoder_start_token_id=32_128)
    (copy / "generation_config.json").unlink()
    with pytest.raises(UserError, match="token_id is 32128; it must be an id below vocab_size, wh"):
        huggingface.model_config(str(copy))


def test_the_start_is_padding_if_no_file_names_it(folder, tmp_path):
    for name in ("config.json", "generation_config.json"):
        copy = changed(folder, tmp_path, name, decoder_start_token_id=None, pad_token_id=3)
    assert huggingface.model_config(str(copy)).start_id == 3


def test_another_eos_is_refused(folder, text_cache, tmp_path):
    for name in ("config.json", "generation_config.json"):
        copy = changed(folder, tmp_path, name, eos_token_id=[7, 9])
    run = prepared(text_cache, copy)
    with pytest.raises(UserError, match="eos_token_id is 7, 9, but EOS of the run's vocabulary is"):
        init_from.start(run)
