"""Positions matter: an encoder without them maps permuted tokens to permuted states, others do not.

t5-experiments has a BERT whose relative bias is in a branch that never runs: its states followed a
permutation to 2.4e-7.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.model.parts import FAMILIES, POSITIONS

L = 12


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("family", ["t5_1_0", "t5_1_1", "bert", "bert_pre_ln"])
def test_only_an_encoder_without_positions_follows_a_permutation(make_tiny, family, position):
    assert FAMILIES[family].positions is None  # all of them
    tiny = make_tiny(family, position=position, head_dim=8, emb_dim=16)
    # Attention weights of unit scale, so that logits are not all alike.
    layer = {**tiny.params["encoder"]["layers_0"]}
    random = np.random.default_rng(1)
    layer["attention"] = {
        name: {
            part: jnp.asarray(random.normal(size=leaf.shape), jnp.float32)
            for part, leaf in kernel.items()
        }
        for name, kernel in layer["attention"].items()
    }
    params = {**tiny.params, "encoder": {**tiny.params["encoder"], "layers_0": layer}}
    tokens, order = random.permutation(np.arange(1, 39))[:L], random.permutation(L)

    def states(tokens):
        return tiny.apply({"encoder_input_tokens": tokens[None]}, params, method="encode")[0]

    moved = np.abs(np.asarray(states(tokens[order])) - np.asarray(states(tokens))[order]).max()
    if position == "none":
        assert moved < 1e-5
    else:
        assert moved > 1e-2
