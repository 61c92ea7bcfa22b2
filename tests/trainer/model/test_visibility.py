"""Visibility of positions, measured by gradients: causality, prefixes, packing, padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.model.visibility import DECODER_SEGMENTS, ENCODER_SEGMENTS, check

# Position schemes that are not the family's own.
SCHEMES = [("t5_1_1", "absolute"), ("t5_1_1", "rotary"), ("lm", "rotary"), ("llama", "relative")]
SLOW_SCHEMES = [
    ("t5_1_1", "relative_per_layer"),
    ("lm", "absolute"),
    ("llama", "absolute"),
    ("primer", "absolute"),
]
SLOW_SCHEMES += [("primer", "rotary"), ("evolved_transformer", "absolute")]


@pytest.fixture(
    scope="module",
    params=[*SCHEMES, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW_SCHEMES)],
    ids=lambda scheme: "-".join(scheme),
)
def with_scheme(request, make_tiny):
    family, position = request.param
    return make_tiny(family, position=position)


def test_unpacked(tiny, batch):
    check(tiny, batch, [1] * 6 + [0], [1] * 5 + [0])


def test_packed(tiny, batch):
    batch["encoder_segment_ids"] = jnp.asarray([ENCODER_SEGMENTS])
    batch["decoder_segment_ids"] = jnp.asarray([DECODER_SEGMENTS])
    check(tiny, batch, ENCODER_SEGMENTS, DECODER_SEGMENTS)


@pytest.mark.parametrize(
    ("family", "segments", "prefix"),
    [
        ("lm", [1] * 5 + [0], [1, 1, 1, 0, 0, 0]),
        ("lm", DECODER_SEGMENTS, [1, 1, 0, 1, 1, 0]),
        ("llama", DECODER_SEGMENTS, [1, 1, 0, 1, 1, 0]),
    ],
    ids=["unpacked", "packed", "llama"],
)
def test_prefix(make_tiny, batch, family, segments, prefix):
    batch["decoder_causal_attention"] = jnp.asarray([prefix])
    batch["decoder_segment_ids"] = jnp.asarray([segments])
    check(make_tiny(family), batch, None, segments, prefix)


def test_packed_rows_equal_rows_of_their_own(tiny):
    lengths = {"encoder": (3, 4), "decoder": (2, 4)}
    tokens = np.random.default_rng(0).integers(1, 40, (2, 2, 4))

    def rows(side: int, name: str, packed: bool) -> np.ndarray:
        examples = [tokens[side, i, :length] for i, length in enumerate(lengths[name])]
        if packed:
            return np.concatenate(examples)[None]
        return np.stack([np.pad(example, (0, 4 - len(example))) for example in examples])

    def batch(packed: bool) -> dict[str, np.ndarray]:
        targets = rows(1, "decoder", packed)
        features = {
            "encoder_input_tokens": rows(0, "encoder", packed),
            "decoder_input_tokens": (targets * 7) % 40,
            "decoder_target_tokens": targets,
            # The first example's first token and the second's first two.
            "decoder_causal_attention": np.array(
                [[1, 0, 1, 1, 0, 0]] if packed else [[1, 0, 0, 0], [1, 1, 0, 0]]
            ),
        }
        if packed:
            for name, sizes in lengths.items():
                features[f"{name}_segment_ids"] = np.repeat([1, 2], sizes)[None]
        return features

    together, apart = tiny.apply(batch(packed=True)), tiny.apply(batch(packed=False))
    np.testing.assert_allclose(together[0, :2], apart[0, :2], atol=2e-6)
    np.testing.assert_allclose(together[0, 2:], apart[1], atol=2e-6)


def test_positions_are_causal_and_packed_with_every_scheme(with_scheme, batch):
    test_packed(with_scheme, batch)


def test_packed_rows_equal_rows_of_their_own_with_every_scheme(with_scheme):
    test_packed_rows_equal_rows_of_their_own(with_scheme)


def test_padding_gives_no_nan(tiny):
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    batch = {name: jnp.zeros((2, 5), int).at[0, :2].set(3) for name in names}

    def mean_logit(params):
        logits = tiny.model.apply({"params": params}, batch)
        return jnp.mean(logits), logits

    gradients, logits = jax.jit(jax.grad(mean_logit, has_aux=True))(tiny.params)
    assert bool(jnp.all(jnp.isfinite(logits)))
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(gradients))


def test_a_token_outside_the_vocabulary_is_not_silently_another(tiny, batch):
    batch = {name: jnp.tile(feature, (2, 1)) for name, feature in batch.items()}
    batch["decoder_input_tokens"] = batch["decoder_input_tokens"].at[0, 2].set(1000)
    logits = tiny.apply(batch)
    assert bool(jnp.all(jnp.isnan(logits[0, 2])))
    assert bool(jnp.all(jnp.isfinite(logits[1])))
