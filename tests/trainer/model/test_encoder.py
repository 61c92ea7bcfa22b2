"""Encoder-only models: BERT by its definition, positions, initial values and learning.

Dimensions: B batch, L length, D model, H heads, K head size, V vocabulary.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from tests.trainer.model.conftest import initial
from trainer.model.positions import T5RelativePosition

FAMILIES = ("bert", "bert_pre_ln")
POSITIONS = ("absolute", "relative", "rotary")
# Packed example of each position, and the same places within the example; 0 is padding.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2]])
PLACES = np.array([[0, 1, 2, 3, 0, 1, 0], [0, 1, 0, 1, 2, 3, 4]])


@pytest.fixture
def batch():
    """Returns two rows of seven different ids; the first row ends in padding."""
    tokens = np.array([[1, 2, 3, 4, 5, 6, 0], [14, 13, 12, 11, 10, 9, 8]])
    types = np.array([[0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1]])
    return {"encoder_input_tokens": tokens, "encoder_token_types": types}


def layer_norm(x, parameters):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-12) * parameters["scale"] + parameters["bias"]


def dense(x, parameters):
    return x @ parameters["kernel"] + parameters["bias"]


def gelu(x):
    return x * (1 + erf(x / np.sqrt(2))) / 2


def turned(x_BLHK, channels, places):
    """Rotary positions as multiplication by complex numbers."""
    half = channels // 2
    angles = places[..., None, None] * 10_000.0 ** (-np.arange(half) / half)
    z = (x_BLHK[..., :half] + 1j * x_BLHK[..., half:channels]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag, x_BLHK[..., channels:]], axis=-1)


def bert_by_definition(params, batch, config):
    """Returns both logits in float64, by Devlin et al. 2019 and the formulas of t5-experiments."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    encoder, pre_norm = params["encoder"], config.family == "bert_pre_ln"
    tokens, types = batch["encoder_input_tokens"], batch["encoder_token_types"]
    rows, length = tokens.shape
    segments = batch.get("encoder_segment_ids", np.ones_like(tokens))
    places = batch.get("encoder_positions", np.arange(length) + np.zeros_like(tokens))
    x = params["token_embedder"]["embedding"][tokens] + encoder["type_embedder"]["embedding"][types]
    if config.position in (None, "absolute"):
        x = x + encoder["position_embedder"]["pos_embedding"][places]
    x = layer_norm(x, encoder["embedding_layer_norm"])
    bias = np.zeros((1, length, length))
    if config.position == "relative":
        distance = np.arange(length)[None, :] - np.arange(length)[:, None]
        bucket = T5RelativePosition(bidirectional=True).bucket(distance)
        bias = encoder["relpos_bias"]["rel_embedding"][:, bucket]
    visible = ((tokens > 0)[:, None] & (segments[:, :, None] == segments[:, None]))[:, None]

    def attention(y, parameters):
        q, k, v = (
            dense(y, parameters[name]).reshape(rows, length, config.num_heads, config.head_dim)
            for name in ("query", "key", "value")
        )
        if config.position == "rotary":
            q, k = (turned(each, config.head_dim // 4, places) for each in (q, k))
        scores = (np.einsum("blhk,bshk->bhls", q, k) + bias) / np.sqrt(config.head_dim)
        scores = np.exp(np.where(visible, scores, -np.inf))
        mixed = np.einsum(
            "bhls,bshk->blhk", scores / np.maximum(scores.sum(-1, keepdims=True), 1e-300), v
        )
        return dense(mixed.reshape(rows, length, -1), parameters["out"])

    def feed_forward(y, parameters):
        return dense(gelu(dense(y, parameters["wi"])), parameters["wo"])

    for number in range(config.num_encoder_layers):
        layer = encoder[f"layers_{number}"]
        for sublayer, name in (
            (partial(attention, parameters=layer["attention"]), "attention_layer_norm"),
            (partial(feed_forward, parameters=layer["mlp"]), "mlp_layer_norm"),
        ):
            if pre_norm:
                x = x + sublayer(layer_norm(x, layer[f"pre_{name}"]))
            else:
                x = layer_norm(x + sublayer(x), layer[f"post_{name}"])
    if pre_norm:
        x = layer_norm(x, encoder["encoder_norm"])
    head = params["mlm_head"]
    transformed = layer_norm(gelu(dense(x, head["dense"])), head["layer_norm"])
    if config.tied_logits is False:
        logits = transformed @ head["logits_dense"]["kernel"]
    else:
        logits = transformed @ params["token_embedder"]["embedding"].T
    pooled = np.tanh(dense(x[:, 0], params["order_head"]["pooler"]))
    return logits + head["logits_bias"], dense(pooled, params["order_head"]["logits"])


def check_definition(tiny, batch):
    ours, expected = tiny.apply(batch), bert_by_definition(tiny.params, batch, tiny.config)
    here = batch["encoder_input_tokens"] > 0  # logits of padding are meaningless
    for mine, theirs, part in zip(ours, expected, (here, slice(None)), strict=True):
        assert mine.dtype == jnp.float32
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(mine[part], theirs[part], rtol=1e-5, atol=1e-5)


@pytest.mark.processes
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_encoder_matches_its_definition(make_tiny, batch, family, position):
    """Also of rows of several examples, which do not see each other."""
    tiny = make_tiny(family, head_dim=8, position=position, num_encoder_layers=2)
    check_definition(tiny, batch)
    check_definition(tiny, batch | {"encoder_segment_ids": SEGMENTS, "encoder_positions": PLACES})


def test_logits_are_tied_by_default(make_tiny, batch):
    tiny = make_tiny("bert", tied_logits=None)
    assert "logits_dense" not in tiny.params["mlm_head"]
    check_definition(tiny, batch)


def test_without_types_all_tokens_are_of_the_first(make_tiny, batch):
    tiny = make_tiny("bert")
    tokens = {"encoder_input_tokens": batch["encoder_input_tokens"]}
    zeros = {**tokens, "encoder_token_types": np.zeros_like(batch["encoder_token_types"])}
    np.testing.assert_array_equal(tiny.apply(tokens)[0], tiny.apply(zeros)[0])
    assert not np.allclose(tiny.apply(batch)[0], tiny.apply(zeros)[0], atol=1e-2)


def test_a_row_longer_than_the_positions_is_refused(make_tiny, batch):
    with pytest.raises(ValueError, match=r"7 tokens, .* has 6 positions: raise max_positions"):
        make_tiny("bert", max_positions=6).apply(batch)
    make_tiny("bert", max_positions=7).apply(batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_parameters_match_bert(make_tiny, family):
    tiny = make_tiny(family, emb_dim=64, head_dim=32, mlp_dim=128, num_encoder_layers=2)
    narrower = 4**0.5 if family == "bert_pre_ln" else 1.0
    for path, leaf in initial(tiny.spec).items():
        names = path.split("/")
        if names[-1] == "scale":
            assert np.all(leaf == 1)
        elif "bias" in names[-1]:
            assert np.all(leaf == 0)
        elif leaf.size > 1000:
            limit = 0.04 / (narrower if names[-2] in ("out", "wo") else 1.0)
            assert 0.9 * limit < np.abs(leaf).max() <= limit
            # A normal cut at two standard deviations has 0.88 of its deviation.
            np.testing.assert_allclose(np.std(leaf), 0.4398 * limit, rtol=0.06)


def test_dropout_draws_for_every_element(make_tiny, batch):
    tiny = make_tiny("bert", dropout_rate=0.5, emb_dim=64)
    params = {"params": tiny.params}

    def states(key):
        return tiny.model.apply(
            params, batch, deterministic=False, rngs={"dropout": key}, method="encode"
        )

    first = states(jax.random.PRNGKey(0))
    np.testing.assert_array_equal(first, states(jax.random.PRNGKey(0)))
    assert not np.allclose(first, states(jax.random.PRNGKey(1)), atol=1e-3)
    assert not np.any(np.asarray(first) == 0)  # the last states are not dropped
    assert not tiny.spec.shared.broadcast_dropout
