"""Folders of RoBERTa and ModernBERT."""

import pytest

from tasks.terminal.command_line import UserError
from tasks.vocabulary import SpecialIds
from tests.trainer.annexes.encoders.cases import CONFIGS_ON_THE_HUB, ENCODERS_LACK
from trainer.huggingface import configs, names, weights
from trainer.huggingface.config_json import from_config

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("name", "changes", "message"), [*ENCODERS_LACK])
def test_what_our_encoders_lack_is_refused(name, changes, message):
    with pytest.raises(UserError, match=message):
        from_config({**CONFIGS_ON_THE_HUB[name], **changes}, "config.json")


def test_without_a_local_base_modernbert_has_the_global_one():
    found = from_config(
        {**CONFIGS_ON_THE_HUB["modernbert_base"], "local_rope_theta": None}, "config.json"
    )
    assert "base=160000" in found.attention_window


@pytest.mark.parametrize(("name", "head"), [("roberta", "lm_head"), ("modernbert", "head")])
def test_an_encoder_without_its_head_is_refused(theirs, name, head):
    made = theirs(name)
    tensors = weights.read(str(made.folder))
    heads = (f"{head}.", "decoder.")
    bare = {name: each for name, each in tensors.items() if not name.startswith(heads)}
    with pytest.raises(UserError, match=f"{head}.dense.* an encoder alone, as saved by"):
        names.from_tensors(bare, made.config, made.written["model_type"], "here", made.pad)


def test_without_a_padding_id_roberta_is_refused(theirs):
    with pytest.raises(UserError, match="roberta needs a padding id"):
        configs.to_config(theirs("roberta").config, 64, special=SpecialIds(pad=None))
