"""Totals of RoBERTa and ModernBERT."""

import pytest

from tests.support.totals import parameter_total
from trainer.config.presets import model_preset

# vocab, emb, mlp, layers; total. Source: the number of parameters of `RobertaForMaskedLM` and
# `ModernBertForMaskedLM` with the checkpoints' config.json, which the Hub's pages show.
ROBERTA_PUBLISHED = {
    "roberta_base": ((50_265, 768, 3072, 12), 124_697_433),
    "roberta_large": ((50_265, 1024, 4096, 24), 355_412_057),
}


MODERNBERT_PUBLISHED = {
    "modernbert_base": ((50_368, 768, 1152, 22), 149_655_232),
    "modernbert_large": ((50_368, 1024, 2624, 28), 395_881_664),
}


def order_head(emb: int) -> int:
    """Our encoders' second head, which those models lack."""
    return emb * emb + emb + 2 * emb + 2


@pytest.mark.parametrize("name", ROBERTA_PUBLISHED)
def test_published_totals_of_roberta(name):
    (vocab, emb, mlp, layers), total = ROBERTA_PUBLISHED[name]
    norm, square = 2 * emb, emb * emb + emb
    layer = 4 * square + (emb * mlp + mlp) + (mlp * emb + emb) + 2 * norm
    unused = 2 * emb  # positions of the padding id and the id below it
    embeddings, head = (vocab + 512 + 1) * emb + norm, square + norm + vocab
    assert embeddings + unused + layers * layer + head == total
    assert parameter_total(model_preset(name)) == total - unused + order_head(emb)


@pytest.mark.parametrize("name", MODERNBERT_PUBLISHED)
def test_published_totals_of_modernbert(name):
    (vocab, emb, mlp, layers), total = MODERNBERT_PUBLISHED[name]
    # Norms: two in each layer but the first, of the embeddings, of the last states, in the head.
    norms, head = (2 * layers - 1 + 3) * emb, emb * emb + vocab
    assert vocab * emb + layers * (4 * emb * emb + 3 * emb * mlp) + norms + head == total
    assert parameter_total(model_preset(name)) == total + order_head(emb)
