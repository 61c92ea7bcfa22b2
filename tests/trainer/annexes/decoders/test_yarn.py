"""The length of rows in pretraining beside YaRN's fields."""

import pytest

from tests.trainer.huggingface.random_shapes import Theirs
from tests.trainer.huggingface.sizes import ORIGINAL, YARN
from tests.trainer.huggingface.test_spellings import rewritten
from trainer.huggingface import load, model_config, parity

pytestmark = pytest.mark.torch


def test_an_original_length_beside_yarn_is_read(tmp_path_factory, tmp_path):
    made = Theirs("qwen3, yarn", tmp_path_factory.mktemp("theirs"))
    rope = {name: value for name, value in YARN.items() if name != ORIGINAL}
    folder, written = rewritten(made, tmp_path, {"rope_parameters": rope, ORIGINAL: 8})
    ours = model_config(folder)
    assert "original_positions=8" in ours.position
    wanted = parity.their_logits(parity.their_model(folder, written))
    found = parity.compare(parity.our_logits(ours, load(folder, ours)), wanted, [made.batch])
    assert found.holds, str(found)
