"""Greedy decoding and sampling, in which rows are independent.

Dimensions: B batch, N new tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config.decoding import SAMPLE, Decoding
from trainer.decoding.next_token import NextToken, Prompts

# A logit of probability 0. Finite, so that differences are not NaN.
NEVER = -1e30


class Found(NamedTuple):
    """Results: new tokens, int32, including EOS and then 0s; and scores, float32."""

    token_BN: jax.Array
    score_B: jax.Array


class _State(NamedTuple):
    number: jax.Array
    token_BN: jax.Array
    last_B: jax.Array
    score_B: jax.Array
    ended_B: jax.Array
    state: Any


def decode(
    model: NextToken, params: Any, prompts: Prompts, decoding: Decoding, key_B: jax.Array
) -> Found:
    """Returns the most likely next tokens, or samples; the score is their log probability.

    Temperature, top_k and top_p do not change the score. A prompt takes `decoding.rows` consecutive
    rows, each with its own sampling key in `key_B`.
    """
    choose = _drawn(decoding) if decoding.method == SAMPLE else _likeliest
    size = decoding.max_new_tokens

    def chosen(found: _State, logits_BV: jax.Array, number: jax.Array, state: Any) -> _State:
        token_B = jnp.where(found.ended_B, 0, choose(logits_BV, key_B, number))
        gain_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), token_B[:, None], axis=1)[:, 0]
        return _State(
            number + 1,
            jax.lax.dynamic_update_slice(found.token_BN, token_B[:, None], (0, number)),
            token_B,
            found.score_B + jnp.where(found.ended_B, 0.0, gain_B),
            found.ended_B | (token_B == decoding.eos_id),
            state,
        )

    def step(found: _State) -> _State:
        logits_BV, state = model.step(params, kept, found.state, found.last_B, found.number - 1)
        return chosen(found, logits_BV, found.number, state)

    def goes_on(found: _State) -> jax.Array:
        return (found.number < size) & ~jnp.all(found.ended_B)

    logits_BV, kept, state = model.start(params, prompts)
    # Padding rows need no tokens.
    begin = (logits_BV, kept, state, prompts.length_B == 0)
    logits_BV, kept, state, ended_B = repeated(begin, decoding.rows)
    batch = len(ended_B)
    nothing = _State(
        jnp.zeros((), jnp.int32),
        jnp.zeros((batch, size), jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, jnp.float32),
        ended_B,
        None,
    )
    first = chosen(nothing, logits_BV, nothing.number, state)
    last = jax.lax.while_loop(goes_on, step, first)
    return Found(last.token_BN, last.score_B)


def repeated(tree: Any, times: int) -> Any:
    """Returns arrays with every row repeated `times` times in succession."""
    if times == 1:
        return tree
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), tree)


def _likeliest(logits_BV: jax.Array, key_B: jax.Array, number: jax.Array) -> jax.Array:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def _drawn(decoding: Decoding) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns the sampler (logits, keys, number of the token) -> tokens [B]."""

    def draw(logits_BV: jax.Array, key_B: jax.Array, number: jax.Array) -> jax.Array:
        keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(key_B)
        limited_BV = limited(logits_BV, decoding)
        return jax.vmap(jax.random.categorical)(keys, limited_BV).astype(jnp.int32)

    return draw


def limited(logits_BV: jax.Array, decoding: Decoding) -> jax.Array:
    """Returns the logits to sample from; excluded tokens get NEVER.

    The logits are divided by the temperature and limited to `top_k` tokens, then to the fewest
    tokens whose probabilities after the first limit sum to `top_p`.

    Source: Fan et al. 2018 (arXiv:1805.04833) for top-k; Holtzman et al. 2020 (arXiv:1904.09751)
    for the nucleus; transformers for their order.
    """
    logits_BV = logits_BV.astype(jnp.float32) / (decoding.temperature or 1.0)
    size = logits_BV.shape[-1]
    if decoding.top_k is not None and decoding.top_k < size:
        least_B1 = jax.lax.top_k(logits_BV, decoding.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < least_B1, NEVER, logits_BV)
    if decoding.top_p is not None and decoding.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probability_BV = jax.nn.softmax(sorted_BV)
        before_BV = jnp.cumsum(probability_BV, axis=-1) - probability_BV
        kept_B = jnp.sum(before_BV < decoding.top_p, axis=-1)
        least_B1 = jnp.take_along_axis(sorted_BV, kept_B[:, None] - 1, axis=1)
        logits_BV = jnp.where(logits_BV < least_B1, NEVER, logits_BV)
    return logits_BV
