"""Block-sparse attention as an attention core."""

from __future__ import annotations

from jax import Array

from trainer.annexes.sparse_patterns.sparse_attention import Dropping, block_sparse_attention
from trainer.model.attention_call import AttentionCall
from trainer.model.dense import tracing_device


def run(call: AttentionCall, q_BLJ: Array, k_BSJ: Array, v_BSJ: Array) -> Array:
    """Returns values mixed over the blocks that the call's pattern shows, [B, L, J]."""
    shared, dropping = call.shared, None
    assert call.pattern is not None
    if call.view.rows is not call.view.source_rows:
        raise ValueError("a pattern needs self-attention")
    if call.drops and shared.broadcast_dropout:
        # Heads that share values drop different values.
        k_BSJ, v_BSJ = call.repeated(k_BSJ), call.repeated(v_BSJ)
        v_BSJ = call.drop_values(v_BSJ)
    elif call.drops:
        dropping = Dropping(shared.dropout_rate, call.module.make_rng("dropout"))
    mixed_BLHK = block_sparse_attention(
        *call.rotated(q_BLJ, k_BSJ),
        call.heads(v_BSJ),
        call.view.rows,
        call.predicate,
        call.pattern,
        call.view.positions.bias_HN,
        call.scale,
        tracing_device().softmax_dtype(shared.softmax_dtype, shared.dtype),
        dropping,
    )
    return mixed_BLHK.reshape(q_BLJ.shape)
