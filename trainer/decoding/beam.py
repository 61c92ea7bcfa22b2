"""Beam search, following T5X's or transformers' rules.

Dimensions: B batch, K beams, C candidates (2 K), N new tokens, V vocabulary, R = B * K rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config.decoding import T5X, Decoding
from trainer.decoding.chains import Found, repeated
from trainer.decoding.next_token import NextToken, Prompts

# The score of an absent sequence: finite, and below all others even after adding log probabilities.
_NONE = -1.0e7


class _State(NamedTuple):
    """Live and finished sequences, best first."""

    number: jax.Array  # tokens of each live sequence
    live_BKN: jax.Array
    live_BK: jax.Array  # log probabilities
    done_BKN: jax.Array  # EOS included
    done_BK: jax.Array  # scores
    full_BK: jax.Array  # False where there is no finished sequence
    open_B: jax.Array  # True where finished sequences can still improve
    state: Any  # the model's state for the live sequences


def search(model: NextToken, params: Any, prompts: Prompts, decoding: Decoding) -> Found:
    """Returns the best `num_return_sequences` of every prompt, best first, prompt after prompt.

    The score is the log probability, divided by the length penalty. Sequences without EOS rank
    after those with EOS (T5X), or count as finished at `max_new_tokens` (transformers).

    Source: Wu et al. 2016 (arXiv:1609.08144), section 7, for the penalty ((5 + length) / 6) **
    alpha; T5X, `decoding.beam_search`, and transformers, `GenerationMixin._beam_search`, for the
    sequences kept and the end of the search.
    """
    beams, size = decoding.beams, decoding.max_new_tokens
    law = (_T5X if decoding.law[0] == T5X else _Transformers)(decoding)

    def step(found: _State) -> _State:
        token_R = jax.lax.dynamic_index_in_dim(
            found.live_BKN, found.number - 1, axis=2, keepdims=False
        ).reshape(-1)
        logits_RV, state = model.step(params, kept, found.state, token_R, found.number - 1)
        return _extended(found, logits_RV.reshape(*found.live_BK.shape, -1), state, law)

    def goes_on(found: _State) -> jax.Array:
        return (found.number < size) & jnp.any(found.open_B)

    logits_BV, kept, state = model.start(params, prompts)
    batch = len(logits_BV)
    logits_RV, kept, state = repeated((logits_BV, kept, state), beams)
    logits_BKV = logits_RV.reshape(batch, beams, -1)
    first = _extended(_empty(prompts, batch, decoding), logits_BKV, state, law)
    return _best(jax.lax.while_loop(goes_on, step, first), law)


class _T5X:
    """T5X's rules: EOS finishes a sequence; the search ends when no live sequence can win."""

    def __init__(self, decoding: Decoding):
        self.decoding, self.alpha = decoding, decoding.law[1]

    def penalty(self, length: Any) -> jax.Array:
        return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** self.alpha

    def ends(self, token_BC: jax.Array, length: jax.Array) -> jax.Array:
        return token_BC == self.decoding.eos_id

    def counted(self, ends_BC: jax.Array) -> jax.Array:
        return ends_BC

    def stays_open(
        self, best_live_B: jax.Array, done_BK: jax.Array, full_BK: jax.Array, length: jax.Array
    ) -> jax.Array:
        reached_B = best_live_B / self.penalty(self.decoding.max_new_tokens + 1)
        return ~(jnp.all(full_BK, axis=1) & (done_BK[:, -1] > reached_B))


class _Transformers(_T5X):
    """transformers' rules: a sequence also ends at `max_new_tokens`."""

    def penalty(self, length: Any) -> jax.Array:
        return jnp.asarray(length, jnp.float32) ** self.alpha

    def ends(self, token_BC: jax.Array, length: jax.Array) -> jax.Array:
        return super().ends(token_BC, length) | (length == self.decoding.max_new_tokens)

    def counted(self, ends_BC: jax.Array) -> jax.Array:
        # A finished candidate outside the best K does not count.
        beams = self.decoding.beams
        return ends_BC & (jnp.arange(2 * beams) < beams)

    def stays_open(
        self, best_live_B: jax.Array, done_BK: jax.Array, full_BK: jax.Array, length: jax.Array
    ) -> jax.Array:
        early = self.decoding.early_stopping
        # The length with the best score that a live sequence can still reach.
        longest = self.decoding.max_new_tokens if early == "never" and self.alpha > 0 else length
        all_full_B = jnp.all(full_BK, axis=1)
        open_B = ~(all_full_B & (best_live_B / self.penalty(longest) <= done_BK[:, -1]))
        return open_B & ~all_full_B if early == "true" else open_B


def _empty(prompts: Prompts, batch: int, decoding: Decoding) -> _State:
    beams = decoding.beams
    none_BK = jnp.full((batch, beams), _NONE, jnp.float32)
    empty_BKN = jnp.zeros((batch, beams, decoding.max_new_tokens), jnp.int32)
    return _State(
        number=jnp.zeros((), jnp.int32),
        live_BKN=empty_BKN,
        # Equal beams would be extended equally, so only the first counts.
        live_BK=none_BK.at[:, 0].set(0.0),
        done_BKN=empty_BKN,
        done_BK=none_BK,
        full_BK=jnp.zeros((batch, beams), bool),
        open_B=jnp.asarray(prompts.length_B) > 0,
        state=None,
    )


def _extended(found: _State, logits_BKV: jax.Array, state: Any, law: _T5X) -> _State:
    batch, beams, vocabulary = logits_BKV.shape
    total_BKV = jax.nn.log_softmax(logits_BKV) + found.live_BK[:, :, None]
    total_BC, index_BC = jax.lax.top_k(total_BKV.reshape(batch, -1), 2 * beams)
    parent_BC, token_BC = index_BC // vocabulary, index_BC % vocabulary
    sequence_BCN = jax.lax.dynamic_update_slice(
        _chosen(found.live_BKN, parent_BC), token_BC[:, :, None], (0, 0, found.number)
    )
    length = found.number + 1
    ends_BC = law.ends(token_BC, length)
    live_BK, place_BK = jax.lax.top_k(jnp.where(ends_BC, _NONE, total_BC), beams)

    may_BC = law.counted(ends_BC & found.open_B[:, None])
    score_BC = jnp.where(may_BC, total_BC / law.penalty(length), _NONE)
    scores = jnp.concatenate([found.done_BK, score_BC], axis=1)
    done_BK, best_BK = jax.lax.top_k(scores, beams)
    sequences = jnp.concatenate([found.done_BKN, sequence_BCN], axis=1)
    full = jnp.concatenate([found.full_BK, may_BC], axis=1)
    full_BK = jnp.take_along_axis(full, best_BK, axis=1)

    parent_BK = jnp.take_along_axis(parent_BC, place_BK, axis=1)
    row_BK = jnp.arange(batch)[:, None] * beams + parent_BK
    return _State(
        number=length,
        live_BKN=_chosen(sequence_BCN, place_BK),
        live_BK=live_BK,
        done_BKN=_chosen(sequences, best_BK),
        done_BK=done_BK,
        full_BK=full_BK,
        open_B=found.open_B & law.stays_open(live_BK[:, 0], done_BK, full_BK, length),
        state=jax.tree.map(lambda leaf: leaf[row_BK.reshape(-1)], state),
    )


def _best(last: _State, law: _T5X) -> Found:
    """Returns finished sequences, then the best unfinished ones."""
    decoding = law.decoding
    ended_B1 = jnp.sum(last.full_BK, axis=1, keepdims=True)
    place_BK = jnp.maximum(jnp.arange(decoding.beams) - ended_B1, 0)
    live_BK = jnp.take_along_axis(last.live_BK, place_BK, axis=1) / law.penalty(last.number)
    live_BKN = _chosen(last.live_BKN, place_BK)
    token_BKN = jnp.where(last.full_BK[:, :, None], last.done_BKN, live_BKN)
    score_BK = jnp.where(last.full_BK, last.done_BK, live_BK)
    count = decoding.num_return_sequences
    tokens = token_BKN[:, :count].reshape(-1, decoding.max_new_tokens)
    return Found(tokens, score_BK[:, :count].reshape(-1))


def _chosen(x_BCN: jax.Array, place_BK: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BCN, place_BK[:, :, None], axis=1)
