"""Runs that start from a folder of transformers take its sizes."""

import json

import pytest

from tasks.terminal.command_line import UserError
from tasks.terminal.flags import made, parse
from tests.support.runs import flags_of
from trainer import huggingface
from trainer.config import from_transformers, save_config
from trainer.config.from_flags import RunFlags, configured, given
from trainer.huggingface import configs
from trainer.setup import prepare


def configuration(*flags):
    return configured(made(RunFlags, parse(RunFlags, flags)))


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with the config.json of a T5 1.1 of odd sizes."""
    config, _ = configuration("--preset=t5_1_1_tiny", "--model.emb_dim=24", "--model.mlp_dim=40")
    path = tmp_path / "theirs"
    path.mkdir()
    written = configs.to_config(config.model, 64)
    (path / "config.json").write_text(json.dumps(written | {"dropout_rate": 0.1}))
    return path


def test_sizes_come_from_the_folder(folder):
    for preset in ([], ["--preset=t5_1_1_small"]):
        config, origins = configuration(
            f"--init_from=hf:{folder}", *preset, "--model.dtype=bfloat16"
        )
        model = config.model
        assert (model.emb_dim, model.mlp_dim, model.num_decoder_layers) == (24, 40, 2)
        assert (model.vocab_size, model.dropout_rate, model.dtype) == (32_128, 0.0, "bfloat16")
        assert origins["model.emb_dim"] == origins["model.vocab_size"] == f"hf:{folder}"
        assert configs.same_model(model, huggingface.model_config(str(folder)))
    config, origins = configuration(f"--init_from=hf:{folder}", "--model.emb_dim=48")
    assert (config.model.emb_dim, origins["model.emb_dim"]) == (48, "command line")


def test_the_vocabulary_of_the_folder_stays(folder, text_cache, tmp_path):
    flags = flags_of(text_cache, tmp_path / "model", f"--init_from=hf:{folder}")
    assert prepare(*configuration(*flags)).config.model.vocab_size == 32_128


@pytest.mark.parametrize("preset", [[], ["--preset=t5_1_1_small"]])
def test_a_resumed_run_needs_no_folder(folder, tmp_path, preset):
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    flags = [f"--init_from=hf:{folder}", *preset, f"--model_dir={model_dir}"]
    config, origins = configuration(*flags)
    save_config(config, origins)
    (folder / "config.json").unlink()
    assert configuration(*flags)[0].model == config.model


def test_folders_that_do_not_fit_are_refused(folder):
    with pytest.raises(UserError, match="is a t5_1_1 model, but --preset=bert_tiny is a bert"):
        configuration(f"--init_from=hf:{folder}", "--preset=bert_tiny")
    with pytest.raises(UserError, match="hf download google/t5-v1_1-small --local-dir=t5-v1_1-s"):
        configuration("--init_from=hf:google/t5-v1_1-small")


def test_a_folder_without_its_prefix_is_recognised(folder, tmp_path):
    with pytest.raises(UserError, match=rf"did you mean --init_from=hf:{folder}\?"):
        configuration(f"--init_from={folder}")
    with pytest.raises(UserError, match="is not a run of this trainer"):
        configuration(f"--init_from={tmp_path}")


def test_the_flag_is_found():
    for words, folder in (
        (["--init_from", "hf:a"], "hf:a"),
        (["--init-from=hf:a", "--seed=1"], "hf:a"),
        (["--init_from=a"], None),
    ):
        assert from_transformers.named_folder(given(words)) == folder
