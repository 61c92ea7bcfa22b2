"""Folding of multipliers into parameters keeps the model's function."""

import numpy as np
import pytest

from tests.support.cases import entries
from tests.trainer.huggingface.conftest import random_batch, random_params
from trainer.huggingface import folding, parity
from trainer.model.config import ModelConfig

pytestmark = pytest.mark.processes

SIZES = {"vocab_size": 384, "emb_dim": 32, "num_heads": 4, "head_dim": 8, "mlp_dim": 64}
MODELS = {
    # Its norms multiply by 1 + scale.
    # Its tied logits follow the head's norm.
    "bert": {"family": "bert", "num_encoder_layers": 2, "num_decoder_layers": 0,
        "max_positions": 64},
    # Its queries are made of its keys.
    **entries("FOLDED"),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"parametrisation": "mup:base_width=8"}, {"logits_scale": 0.5}, {"attention_scale": 0.3}],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("name", MODELS)
def test_a_folded_model_has_the_logits_of_the_model(name, changes):
    config = ModelConfig(**SIZES, **MODELS[name], **changes)
    params, batch = random_params(config), random_batch(config, rows=2, length=20)
    target = folding.folded(config)
    assert target != config
    found = parity.our_logits(target, folding.fold(params, config))(batch)
    for ours, expected in zip(found, parity.our_logits(config, params)(batch), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())
