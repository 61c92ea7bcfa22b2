"""Windows of layers: which keys each layer sees, written out pair by pair."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.cases import entries
from tests.support.parameters import slow_unless
from tests.trainer.huggingface.conftest import random_batch, random_params
from tests.trainer.model.conftest import tiny_config
from trainer.engine.cost import self_pairs
from trainer.model.layers import stack_layers, unstack_layers
from trainer.model.masks import Mask, Rows, seen_from
from trainer.model.spec import model_spec
from trainer.model.transformer import SownLogits, build_model, run_model

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
PREFIX = np.array([[1, 1, 1, 0, 1, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 20])
@pytest.mark.parametrize(("causal", "prefix"), [(False, False), (True, False), (True, True)])
def test_a_window_leaves_out_keys_far_away(window, causal, prefix):
    rows = Rows(jnp.asarray(SEGMENTS), jnp.asarray(PREFIX))
    found = np.asarray(Mask(causal, prefix, window)(rows, rows))[0]
    segments, inside = SEGMENTS[0], PREFIX[0] > 0
    for query, key in np.ndindex(found.shape):
        seen = segments[query] == segments[key] > 0 and abs(query - key) < (window or 99)
        if causal:
            seen &= key <= query or (prefix and inside[query] and inside[key])
        assert found[query, key] == seen, (query, key)


def test_a_window_may_see_further_ahead_than_behind():
    rows = Rows(jnp.ones((1, 9), jnp.int32))
    found = np.asarray(Mask(window=2, ahead=3)(rows, rows))[0]
    for query, key in np.ndindex(found.shape):
        assert found[query, key] == (-2 < key - query <= 3), (query, key)


def test_the_next_token_sees_the_same_slots_as_in_a_whole_row():
    mask, slot = Mask(causal=True, window=3), 5
    seen_BS = jnp.asarray([[False, True, True, True, True, True, False]])
    found = np.asarray(seen_from(mask, slot, seen_BS))
    assert found.tolist() == [[[False, False, False, True, True, True, False]]]
    assert seen_from(Mask(causal=True), slot, seen_BS).tolist() == [seen_BS.tolist()]


@pytest.mark.parametrize(
    ("options", "encoder", "decoder"),
    [
        ("window=4", [3, 3, 3], [4, 4, 4]),  # two keys on either side; four with the query's own
        ("window=4,layers=gl", [None, 3, None], [None, 4, None]),
        ("window=4,layers=l,reach=4", [5, 5, 5], [4, 4, 4]),
        ("window=5,decoder=false", [3, 3, 3], [None, None, None]),
    ],
)
def test_local_layers_of_both_stacks(options, encoder, decoder):
    layers = {"num_encoder_layers": 3, "num_decoder_layers": 3}
    config = tiny_config("t5_1_1", attention_window=f"sliding:{options}", **layers)
    spec = model_spec(config)

    def windows(stack):
        return [layer.mask and layer.mask.window for layer in stack.layers]

    assert windows(spec.encoder) == encoder
    assert windows(spec.decoder) == decoder
    assert [layer.mask.causal for layer in spec.decoder.layers if layer.mask] == [True] * (
        len(decoder) - decoder.count(None)
    )


SCANNED = {
    "t5_1_1": {"num_encoder_layers": 3, "num_decoder_layers": 2},
    **entries("SCANNED_WINDOWS"),
}


@pytest.mark.processes
@pytest.mark.parametrize("family", slow_unless({"t5_1_1"}, SCANNED))
def test_a_scan_runs_local_and_global_layers_in_turn(family):
    base = ",base=50" if SCANNED[family].get("position") == "rotary" else ""
    window = f"sliding:window=3,layers={'lg' if family == 't5_1_1' else 'llg'}{base}"
    sizes = {"attention_window": window, "vocab_size": 384, "head_dim": 4}
    config = tiny_config(family, **{"num_encoder_layers": 0, **sizes, **SCANNED[family]})
    params, batch = random_params(config), random_batch(config, 2, 20)
    weights = np.random.default_rng(0).normal(size=384).astype(np.float32)

    def total(params, config):
        output = run_model(build_model(model_spec(config)), params, batch)
        logits_BLV, *sown = output if isinstance(output, SownLogits) else (output,)
        return jnp.sum(logits_BLV * weights) + sum(each.loss for each in sown)

    plain = replace(config, scan_layers=False, remat="none")
    expected = jax.jit(jax.value_and_grad(lambda params: total(params, plain)))(params)
    config = replace(config, scan_layers=True)
    found = jax.jit(jax.value_and_grad(lambda params: total(params, config)))(stack_layers(params))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4)
    for one, two in zip(
        *(jax.tree.leaves(each) for each in (unstack_layers(found[1]), expected[1])), strict=True
    ):
        np.testing.assert_allclose(one, two, atol=1e-4 * np.abs(two).max())


@pytest.mark.parametrize(
    "mask",
    [Mask(window=4), Mask(window=3, ahead=5), Mask(causal=True, window=4), Mask(True, True, 50)],
)
def test_pairs_of_a_window_are_those_it_sees(mask):
    length = 11
    rows = Rows(jnp.ones((1, length), jnp.int32), jnp.zeros((1, length), jnp.int32))
    mixer = model_spec(tiny_config("lm")).decoder.layers[0].mixer
    pairs = self_pairs(mixer, mask, length)
    if mask.window < length:
        assert pairs == np.asarray(mask(rows, rows)).sum()
    else:
        assert pairs == length**2
