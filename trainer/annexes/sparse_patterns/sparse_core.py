"""Block-sparse attention as an attention core."""

from __future__ import annotations

from jax import Array

from trainer.annexes.sparse_patterns.sparse_attention import Dropping, block_sparse_attention
from trainer.model.attending import Attending
from trainer.model.dense import tracing_device


def run(at: Attending, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array) -> Array:
    shared, dropping = at.shared, None
    assert at.pattern is not None
    if at.view.rows is not at.view.source_rows:
        raise ValueError("a pattern needs self-attention")
    if at.drops and shared.broadcast_dropout:
        # Heads that share values drop different values.
        k_BSJ, v_BSJ = at.repeated(k_BSJ), at.repeated(v_BSJ)
        v_BSJ = at.drop_values(v_BSJ)
    elif at.drops:
        dropping = Dropping(shared.dropout_rate, at.module.make_rng("dropout"))
    mixed_BLHK = block_sparse_attention(
        *at.rotated(q_BLJ, k_BSJ),
        at.heads(v_BSJ),
        at.view.rows,
        at.predicate,
        at.pattern,
        at.view.positions.bias_HN,
        at.scale,
        tracing_device().softmax_dtype(shared.softmax_dtype, shared.dtype),
        dropping,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)
