"""Batches of a cache as the Grain input of MaxText, for models that decode from left to right.

In MaxText's `make_grain_train_iterator`, replace the calls of `get_ds_fn` and `preprocessing_fn`:

    batches = palimpsest.batches(
        "mine_autoregressive_lm", cache_dir=…, preset="lm_small", train_steps=config.steps,
        batch_size=config.global_batch_size_to_load, lengths={"targets": config.max_target_length},
    )
    train_dataloader = dataset(batches, shard_index, shard_count)
"""

import grain
import numpy as np


def for_maxtext(batch):
    """Returns the arrays that MaxText's training step reads, int32 [rows, length]."""
    tokens, targets = batch["decoder_input_tokens"], batch["decoder_target_tokens"]
    weights = batch["decoder_loss_weights"]
    segments = batch.get("decoder_segment_ids", np.ones_like(tokens))
    positions = batch.get("decoder_positions", np.arange(tokens.shape[1], dtype=np.int32))
    positions = np.broadcast_to(positions, tokens.shape)
    return {
        "inputs": tokens,
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets": targets,
        "targets_position": positions,
        "targets_segmentation": np.where(weights > 0, segments, 0),  # 0: no loss
    }


def dataset(batches, shard_index, shard_count):
    """Returns one host's rows as a grain.IterDataset, whose iterator saves the batch's index."""
    rows = batches.shard(shard_index, shard_count)
    return grain.MapDataset.source(rows).map(for_maxtext).to_iter_dataset()
