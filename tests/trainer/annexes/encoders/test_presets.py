"""Totals of RoBERTa and ModernBERT."""

import pytest

from tests.support.totals import parameter_total
from trainer.config.presets import model_preset

# Source: the number of parameters of `RobertaForMaskedLM` and `ModernBertForMaskedLM` with the
# checkpoints' config.json, which the Hub's pages show.
PUBLISHED = {
    "roberta_base": 124_697_433, "roberta_large": 355_412_057,
    "modernbert_base": 149_655_232, "modernbert_large": 395_881_664,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    config = model_preset(name)
    emb = config.emb_dim
    # RoBERTa has positions of the padding id and the id below it, and we a second head.
    unused = 2 * emb * name.startswith("roberta")
    order_head = emb * emb + emb + 2 * emb + 2
    assert parameter_total(config) == PUBLISHED[name] - unused + order_head
