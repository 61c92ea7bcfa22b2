"""Windows of layers: which keys each layer sees, written out pair by pair."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.model.conftest import tiny_config
from trainer.model.masks import Mask, Rows, seen_from
from trainer.model.spec import model_spec

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]])
PREFIX = np.array([[1, 1, 1, 0, 1, 0, 0, 0, 0, 0]])


@pytest.mark.parametrize("window", [1, 2, 3, 20])
@pytest.mark.parametrize(("causal", "prefix"), [(False, False), (True, False), (True, True)])
def test_a_window_leaves_out_keys_far_away(window, causal, prefix):
    rows = Rows(jnp.asarray(SEGMENTS), jnp.asarray(PREFIX))
    found = np.asarray(Mask(causal, prefix, window)(rows, rows))[0]
    segments, inside = SEGMENTS[0], PREFIX[0] > 0
    for query, key in np.ndindex(found.shape):
        seen = segments[query] == segments[key] > 0 and abs(query - key) < window
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
