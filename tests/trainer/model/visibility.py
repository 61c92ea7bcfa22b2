"""Compares the positions that a model sees, measured by gradients, with those it should see.

Every input position holds a token of its own, so the gradient of a logit by that token's
embedding is nonzero exactly where the position is seen.
"""

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from trainer.model.paths import named
from trainer.model.transformer import SownLogits, run_model

# Packed example of each position; 0 is padding.
ENCODER_SEGMENTS = [1, 1, 1, 2, 2, 2, 0]
DECODER_SEGMENTS = [1, 1, 1, 2, 2, 0]


def influence(tiny, batch) -> np.ndarray:
    """Returns bool [decoder positions, vocabulary]: True if a token moves the logits."""
    leaves = named(tiny.params)
    tables = {p: leaf for p, leaf in leaves.items() if p.endswith("token_embedder/embedding")}

    def logit_mixes(tables):
        params = unflatten_dict(leaves | tables, sep="/")
        output = run_model(tiny.model, params, batch)
        logits_LV = (output.logits_BLV if isinstance(output, SownLogits) else output)[0]
        # A random mix, since some effects might cancel in the sum of logits.
        return logits_LV @ jax.random.normal(jax.random.PRNGKey(1), logits_LV.shape[-1:])

    moved = jax.jit(jax.jacrev(logit_mixes))(tables)
    # Tokens of both sides differ, so several tables do not hide one another.
    return np.any([np.asarray(each) != 0 for each in moved.values()], axis=(0, -1))


def check(tiny, batch, encoder_segments, decoder_segments, prefix=None) -> None:
    """Compares with visibility written out pair by pair; rows of padding are meaningless."""
    seen = influence(tiny, batch)
    for query, query_segment in enumerate(decoder_segments):
        if query_segment == 0:
            continue
        for key, key_segment in enumerate(decoder_segments):
            both_prefix = prefix is not None and prefix[query] and prefix[key]
            expected = query_segment == key_segment and (key <= query or bool(both_prefix))
            token = int(batch["decoder_input_tokens"][0, key])
            assert seen[query, token] == expected, f"decoder {query} of decoder {key}"
        if tiny.has_encoder:
            for key, key_segment in enumerate(encoder_segments):
                token = int(batch["encoder_input_tokens"][0, key])
                expected = key_segment != 0 and query_segment == key_segment
                assert seen[query, token] == expected, f"decoder {query} of encoder {key}"
