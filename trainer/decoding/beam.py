"""Beam search, by T5X's law or by transformers'.

Dimensions: B batch, K beams, C candidates (2 K), N new tokens, V vocabulary, R = B * K rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.config.decoding import T5X, Decoding
from trainer.decoding.chains import Found, repeated
from trainer.decoding.next_token import NextToken, Prompts

# The score of a sequence that is not there. Sums of it with log probabilities stay finite, and one
# is enough to be below all others.
_NONE = -1.0e7


class _State(NamedTuple):
    """Live sequences, best first, and finished ones, best first.

    Attributes:
      number: tokens that live sequences have.
      live_BKN: their tokens.
      live_BK: their log probabilities.
      done_BKN: tokens of finished sequences, EOS included.
      done_BK: their scores.
      full_BK: False where there is no finished sequence.
      open_B: finished sequences can still become better.
      state: what the model remembers of live sequences.
    """

    number: jax.Array
    live_BKN: jax.Array
    live_BK: jax.Array
    done_BKN: jax.Array
    done_BK: jax.Array
    full_BK: jax.Array
    open_B: jax.Array
    state: Any


def search(model: NextToken, params: Any, prompts: Prompts, decoding: Decoding) -> Found:
    """Returns the best `num_return_sequences` of every prompt, best first, one after the other.

    The score is the log probability, divided by the length penalty. Sequences without EOS come
    after those that have one (T5X), or count as finished at `max_new_tokens` (transformers).

    Source: Wu et al. 2016 (arXiv:1609.08144), section 7, for the penalty ((5 + length) / 6) **
    alpha; T5X, `decoding.beam_search`, and transformers, `GenerationMixin._beam_search`, for what
    is kept and when the search stops.
    """
    beams, size = decoding.beams, decoding.max_new_tokens
    name, alpha = decoding.law
    t5x, early = name == T5X, decoding.early_stopping or "false"

    def penalty(length: Any) -> jax.Array:
        length = jnp.asarray(length, jnp.float32)
        return ((5.0 + length) / 6.0) ** alpha if t5x else length**alpha

    def extend(found: _State, logits_BKV: jax.Array, state: Any) -> _State:
        batch, _, vocabulary = logits_BKV.shape
        total_BKV = jax.nn.log_softmax(logits_BKV) + found.live_BK[:, :, None]
        total_BC, index_BC = jax.lax.top_k(total_BKV.reshape(batch, -1), 2 * beams)
        parent_BC, token_BC = index_BC // vocabulary, index_BC % vocabulary
        sequence_BCN = _chosen(found.live_BKN, parent_BC)
        sequence_BCN = jax.lax.dynamic_update_slice(
            sequence_BCN, token_BC[:, :, None], (0, 0, found.number)
        )
        length = found.number + 1
        ends_BC = token_BC == decoding.eos_id
        if not t5x:
            ends_BC |= length == size

        live_BC = jnp.where(ends_BC, _NONE, total_BC)
        live_BK, place_BK = jax.lax.top_k(live_BC, beams)

        may_BC = ends_BC & found.open_B[:, None]
        if not t5x:
            # A sequence that a live one surpasses does not count.
            may_BC &= jnp.arange(2 * beams) < beams
        score_BC = jnp.where(may_BC, total_BC / penalty(length), _NONE)
        scores = jnp.concatenate([found.done_BK, score_BC], axis=1)
        done_BK, best_BK = jax.lax.top_k(scores, beams)
        sequences = jnp.concatenate([found.done_BKN, sequence_BCN], axis=1)
        full = jnp.concatenate([found.full_BK, may_BC], axis=1)
        full_BK = jnp.take_along_axis(full, best_BK, axis=1)

        # What a live sequence can still reach.
        reach = size + 1 if t5x else (size if early == "never" and alpha > 0 else length)
        best_live_B, worst_done_B = live_BK[:, 0] / penalty(reach), done_BK[:, -1]
        all_full_B = jnp.all(full_BK, axis=1)
        if t5x:
            open_B = found.open_B & ~(all_full_B & (worst_done_B > best_live_B))
        else:
            open_B = found.open_B & ~(all_full_B & (best_live_B <= worst_done_B))
            if early == "true":
                open_B &= ~all_full_B
        row_BK = jnp.arange(batch)[:, None] * beams + jnp.take_along_axis(
            parent_BC, place_BK, axis=1
        )
        return _State(
            length,
            _chosen(sequence_BCN, place_BK),
            live_BK,
            _chosen(sequences, best_BK),
            done_BK,
            full_BK,
            open_B,
            jax.tree.map(lambda leaf: leaf[row_BK.reshape(-1)], state),
        )

    def step(found: _State) -> _State:
        token_R = jax.lax.dynamic_index_in_dim(
            found.live_BKN, found.number - 1, axis=2, keepdims=False
        ).reshape(-1)
        logits_RV, state = model.step(params, kept, found.state, token_R, found.number - 1)
        return extend(found, logits_RV.reshape(*found.live_BK.shape, -1), state)

    def goes_on(found: _State) -> jax.Array:
        return (found.number < size) & jnp.any(found.open_B)

    logits_BV, kept, state = model.start(params, prompts)
    batch = len(logits_BV)
    logits_RV, kept, state = repeated((logits_BV, kept, state), beams)
    none_BK, empty_BKN = (
        jnp.full((batch, beams), _NONE, jnp.float32),
        jnp.zeros((batch, beams, size), jnp.int32),
    )
    first = _State(
        jnp.zeros((), jnp.int32),
        empty_BKN,
        # Equal beams would be extended equally: only the first one counts.
        none_BK.at[:, 0].set(0.0),
        empty_BKN,
        none_BK,
        jnp.zeros((batch, beams), bool),
        jnp.asarray(prompts.length_B) > 0,
        None,
    )
    last = jax.lax.while_loop(
        goes_on, step, extend(first, logits_RV.reshape(batch, beams, -1), state)
    )
    # Sequences that have ended come first, then the best of those that have not.
    ended_B1 = jnp.sum(last.full_BK, axis=1, keepdims=True)
    place_BK = jnp.maximum(jnp.arange(beams) - ended_B1, 0)
    live_BK = jnp.take_along_axis(last.live_BK, place_BK, axis=1) / penalty(last.number)
    live_BKN = _chosen(last.live_BKN, place_BK)
    token_BKN = jnp.where(last.full_BK[:, :, None], last.done_BKN, live_BKN)
    score_BK = jnp.where(last.full_BK, last.done_BK, live_BK)
    count = decoding.num_return_sequences
    return Found(token_BKN[:, :count].reshape(-1, size), score_BK[:, :count].reshape(-1))


def _chosen(x_BCN: jax.Array, place_BK: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BCN, place_BK[:, :, None], axis=1)
