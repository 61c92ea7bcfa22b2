"""Folders of Switch Transformers."""

import pytest

from tasks.terminal.command_line import UserError
from trainer.huggingface.config_json import from_config

pytestmark = pytest.mark.torch


def test_layers_with_experts_that_are_not_every_nth_are_refused(theirs):
    written = theirs("switch").written
    text = "experts to layers 2, 6 of the encoder and 2 of the decoder"
    changes = {"num_layers": 8, "num_sparse_encoder_layers": 2, "encoder_sparse_step": None}
    with pytest.raises(UserError, match=text):
        from_config({**written, **changes}, "config.json")
