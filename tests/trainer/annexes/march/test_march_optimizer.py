"""MARCH's optimizer: what does not decay, and which runs are told of it."""

import pytest

from tests.trainer.reporting.test_reports import optimizer_line
from trainer.config.optimizer import OPTIMIZER_PRESETS
from trainer.config.presets import MODEL_PRESETS
from trainer.model.paths import named
from trainer.model.spec import model_spec
from trainer.model.transformer import decayed
from trainer.optim.optimizer import weight_decay_mask


def test_norms_and_tables_of_relative_positions_do_not_decay():
    mask = weight_decay_mask(OPTIMIZER_PRESETS["march"].optimizer.no_weight_decay)
    for tensor, decays in named(mask(decayed(model_spec(MODEL_PRESETS["march_v1"])))).items():
        assert decays == tensor.endswith(("kernel", "token_embedder/embedding")), tensor


@pytest.mark.parametrize("preset", ["march_v1", "mini_march_v1"])
def test_a_run_with_the_default_optimizer_names_that_of_march(preset):
    hint = f"; the source of {preset} trains with --optimizer_preset=march"
    assert optimizer_line(preset) == f"adafactor, T5X's default{hint}"
    line = optimizer_line(preset, optimizer_preset="march")
    assert line == "adamw, optimizer preset march"
