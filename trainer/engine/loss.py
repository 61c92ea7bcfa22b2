"""Training losses and their metrics.

Dimensions: B batch, L length, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from tasks import annexes
from trainer.config import LossConfig
from trainer.engine.metrics import Metrics
from trainer.model.dense import tracing_device
from trainer.model.transformer import Batch, Encoder, Predictions, SownLogits, Transformer


class Scale(NamedTuple):
    """Parameter-independent divisors of sums over a batch.

    `divisor` is the normaliser's; `weight`, the sum of token weights, is only for auxiliary losses;
    `rows`, the number of rows with tokens, is only for the sentence-order loss.
    """

    divisor: jax.Array | float
    weight: jax.Array | float
    rows: jax.Array | float


class Statistics(NamedTuple):
    """Statistics of each row of logits; all are float32 [B, L].

    `log_z` is log(sum(exp(logits))); `rival` is the highest logit except the target's.
    """

    log_z: jax.Array
    target: jax.Array
    rival: jax.Array
    total: jax.Array


class ModelLoss(NamedTuple):
    """The loss for one kind of model.

    `of_batch` maps (model output, batch, LossConfig, optional Scale) to (scalar to differentiate,
    metrics); with the whole batch's scale, the losses of microbatches add up to the batch's loss.
    """

    of_batch: Callable[..., tuple[jax.Array, Metrics]]
    metrics: tuple[str, ...]
    side: str

    def scale(self, batch: Batch, config: LossConfig) -> Scale:
        """Returns the scale of a batch's loss."""
        return scale_of(batch, self.side, config)


def scale_of(batch: Batch, side: str, config: LossConfig) -> Scale:
    """Returns the scale of the loss of the "encoder" or the "decoder"."""
    weights_BL, divisor = _normalise(
        batch[f"{side}_loss_weights"].astype(jnp.float32), config, batch.get(f"{side}_segment_ids")
    )
    rows = jnp.sum(_has_tokens(batch)) if side == "encoder" else 0.0
    return Scale(divisor, jnp.sum(weights_BL), rows)


def decoder_loss(
    logits_BLV: jax.Array, batch: Batch, config: LossConfig, scale: Scale | None = None
) -> tuple[jax.Array, Metrics]:
    """Returns `loss_and_metrics` for the decoder; `scale` defaults to the batch's own."""
    scale = scale or scale_of(batch, "decoder", config)
    return _side_loss(logits_BLV, batch, "decoder", config, scale)


def sown_loss(
    output: SownLogits, batch: Batch, config: LossConfig, scale: Scale | None = None
) -> tuple[jax.Array, Metrics]:
    """Returns `decoder_loss` plus the auxiliary loss that layers sow, and the metrics of both.

    The auxiliary loss is scaled like the token loss: if the normaliser yields c times the mean
    token loss, c times the auxiliary loss is added. Metrics: `auxiliary_loss`, the mean over
    batches or microbatches, and those that are sown.

    Source: Mesh TensorFlow, `moe.py`, with the c of "num_total_target_tokens".
    """
    own = scale_of(batch, "decoder", config)
    scale, sown = scale or own, output.sown
    loss, metrics = decoder_loss(output.logits_BLV, batch, config, scale)
    loss += own.weight / scale.divisor * sown.loss
    of_sown = {"auxiliary_loss": (sown.loss, jnp.ones(())), **sown.metrics}
    return loss, {**metrics, **jax.lax.stop_gradient(of_sown)}


def encoder_loss(
    predictions: Predictions, batch: Batch, config: LossConfig, scale: Scale | None = None
) -> tuple[jax.Array, Metrics]:
    """Returns `loss_and_metrics` for the encoder plus the sentence-order loss.

    The sentence-order loss is the mean cross entropy over rows with tokens, scaled like the token
    loss (see `sown_loss`); with c = 1 this is BERT's sum of two means. It is 0 if the batch has
    no `sentence_order`. Metrics `order_loss` (nats) and `order_accuracy` are weighted by rows, the
    others by tokens.

    Source: google-research/bert, `run_pretraining.py`.
    """
    scale = scale or scale_of(batch, "encoder", config)
    loss, metrics = _side_loss(predictions.logits_BLV, batch, "encoder", config, scale)
    order_B = batch.get("sentence_order")
    if order_B is None:
        none = jnp.zeros((), jnp.float32)
        return loss, {**metrics, "order_loss": (none, none), "order_accuracy": (none, none)}
    has_tokens_B = _has_tokens(batch)
    log_probabilities_BC = jax.nn.log_softmax(predictions.row_logits_BC)
    picked_B = jnp.arange(log_probabilities_BC.shape[-1]) == order_B[:, None]
    order_loss_B = -jnp.sum(jnp.where(picked_B, log_probabilities_BC, 0.0), axis=-1)
    correct_B = jnp.argmax(log_probabilities_BC, axis=-1) == order_B
    rows, total = jnp.sum(has_tokens_B), jnp.sum(order_loss_B * has_tokens_B)

    loss += scale.weight / scale.divisor * total / jnp.maximum(scale.rows, 1.0)
    order_metrics = {
        "order_loss": (total, rows),
        "order_accuracy": (jnp.sum(correct_B * has_tokens_B), rows),
    }
    return loss, {**metrics, **jax.lax.stop_gradient(order_metrics)}


def _has_tokens(batch: Batch) -> jax.Array:
    places_BL = batch.get("encoder_segment_ids", batch["encoder_input_tokens"])
    return jnp.any(places_BL > 0, axis=-1).astype(jnp.float32)


def _side_loss(
    logits_BLV: jax.Array, batch: Batch, side: str, config: LossConfig, scale: Scale
) -> tuple[jax.Array, Metrics]:
    return loss_and_metrics(
        logits_BLV,
        batch[f"{side}_target_tokens"],
        batch[f"{side}_loss_weights"],
        config,
        batch.get(f"{side}_segment_ids"),
        scale.divisor,
    )


def sequence_accuracy(output: jax.Array | SownLogits | Predictions, batch: Batch) -> Metrics:
    """Returns the share of rows with targets whose targets all rank first; {} for encoders."""
    if isinstance(output, Predictions):
        return {}
    logits_BLV = output.logits_BLV if isinstance(output, SownLogits) else output
    counted_BL = batch["decoder_loss_weights"] > 0
    target_BL, rival_BL = _target_and_rival(logits_BLV, batch["decoder_target_tokens"])
    counted_B = jnp.any(counted_BL, axis=-1)
    whole_B = counted_B & jnp.all((target_BL > rival_BL) | ~counted_BL, axis=-1)
    whole, counted = (jnp.sum(each_B).astype(jnp.float32) for each_B in (whole_B, counted_B))
    return {"sequence_accuracy": (whole, counted)}


def model_loss(model: Transformer | Encoder) -> ModelLoss:
    """Returns the loss for `model`."""
    names = ("loss", "z_loss", "accuracy")
    if isinstance(model, Encoder):
        return ModelLoss(encoder_loss, (*names, "order_loss", "order_accuracy"), "encoder")
    if model.spec.sown is not None:
        return ModelLoss(sown_loss, (*names, "auxiliary_loss", *model.spec.sown), "decoder")
    return ModelLoss(decoder_loss, names, "decoder")


def loss_and_metrics(
    logits_BLV: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    config: LossConfig,
    segment_ids_BL: jax.Array | None = None,
    divisor: jax.Array | float | None = None,
) -> tuple[jax.Array, Metrics]:
    """Returns the scalar to differentiate, and metrics as float32 (sum, weight) pairs.

    Metrics are weighted by `weights_BL` and independent of the normaliser: `loss` (cross entropy in
    nats, without z-loss), `z_loss`, and `accuracy` (the fraction of targets with the strictly
    highest logit). Logits of any float dtype are converted to float32. `segment_ids_BL` numbers
    each position's sequence in its row, 0 for none; by default, each row is one sequence. For part
    of a batch, pass the whole batch's `divisor`.

    Source: google-research/t5x, `losses.py`.
    Differences: the `loss` metric uses unsmoothed targets, so that runs with and without label
    smoothing are comparable; T5X reports the smoothed loss. A target that ties for the highest
    logit counts as wrong; T5X lets the lowest id win. T5X's argmax costs as much on a TPU as the
    sum of exponentials.
    """
    logits_BLV = logits_BLV.astype(jnp.float32)
    weights_BL = weights_BL.astype(jnp.float32)
    log_z_BL, target_logit_BL, logit_sum_BL, correct_BL = _summarise(logits_BLV, targets_BL)
    cross_entropy_BL = log_z_BL - target_logit_BL
    z_loss_BL = config.z_loss * jnp.square(log_z_BL)

    loss_BL = cross_entropy_BL
    if config.label_smoothing > 0:
        vocab_size = logits_BLV.shape[-1]
        confidence = 1.0 - config.label_smoothing
        rest = config.label_smoothing / (vocab_size - 1)
        loss_BL = log_z_BL - (confidence - rest) * target_logit_BL - rest * logit_sum_BL
        # Subtract the entropy of the smoothed targets, so that a perfect model's loss is 0.
        loss_BL -= -confidence * math.log(confidence) - config.label_smoothing * math.log(rest)

    loss_weights_BL, own_divisor = _normalise(weights_BL, config, segment_ids_BL)
    divisor = own_divisor if divisor is None else divisor
    loss = jnp.sum((loss_BL + z_loss_BL) * loss_weights_BL) / divisor

    weight = jnp.sum(weights_BL)
    metrics = {
        "loss": (jnp.sum(cross_entropy_BL * weights_BL), weight),
        "z_loss": (jnp.sum(z_loss_BL * weights_BL), weight),
        "accuracy": (jnp.sum(correct_BL * weights_BL), weight),
    }
    return loss, jax.lax.stop_gradient(metrics)


def token_weights(batch: Batch, side: str, config: LossConfig) -> tuple[jax.Array, jax.Array]:
    """Returns the weights [B, L] of the tokens of a side in the loss, and in metrics."""
    counted_BL = batch[f"{side}_loss_weights"].astype(jnp.float32)
    return _normalise(counted_BL, config, batch.get(f"{side}_segment_ids"))[0], counted_BL


def _normalise(
    weights_BL: jax.Array, config: LossConfig, segment_ids_BL: jax.Array | None
) -> tuple[jax.Array, jax.Array | float]:
    """Returns the weight of each token's loss, and the divisor of the weighted sum."""
    if config.normalizer == "num_real_target_tokens":
        return weights_BL, jnp.sum(weights_BL)
    if config.normalizer == "num_total_target_tokens":
        return weights_BL, float(weights_BL.size)
    if config.normalizer == "average_per_sequence":
        if segment_ids_BL is None:
            totals_BL = jnp.sum(weights_BL, axis=-1, keepdims=True)
        else:
            totals_BL = _sum_over_segment(weights_BL, segment_ids_BL)
        # A sequence whose weights are all 0 gets shares of 0, not NaN.
        shares_BL = jnp.where(totals_BL > 0, weights_BL / jnp.where(totals_BL > 0, totals_BL, 1), 0)
        return shares_BL, jnp.sum(shares_BL)
    return weights_BL, config.normalizing_constant or 1.0


def _sum_over_segment(weights_BL: jax.Array, segment_ids_BL: jax.Array) -> jax.Array:
    # A row of L positions has at most L segments, numbered from 1.
    num_segments = weights_BL.shape[1] + 1

    def one_row(weights_L: jax.Array, segment_ids_L: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(weights_L, segment_ids_L, num_segments)[segment_ids_L]

    return jax.vmap(one_row)(weights_BL, segment_ids_BL)


@jax.custom_vjp
def _summarise(
    logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns log(sum(exp(logits))), target logit, logit sum, and whether the target wins.

    All are [B, L] and float32, but the last is bool. The hand-written gradient keeps only logits
    and log Z from the forward pass; autodiff would keep a second [B, L, V] array.
    """
    found = _statistics(logits_BLV, targets_BL)
    return found.log_z, found.target, found.total, found.target > found.rival


def _statistics(logits_BLV: jax.Array, targets_BL: jax.Array) -> Statistics:
    """Computes statistics of float32 logits, with a kernel where one can read their rows."""
    run = _kernel_for(logits_BLV)
    if run:
        return run(logits_BLV, targets_BL)
    target_BL, rival_BL = _target_and_rival(logits_BLV, targets_BL)
    maximum_BL = jnp.maximum(target_BL, rival_BL)
    sum_exp_BL = jnp.sum(jnp.exp(logits_BLV - maximum_BL[..., None]), axis=-1)
    log_z_BL = jnp.log(sum_exp_BL) + maximum_BL
    return Statistics(log_z_BL, target_BL, rival_BL, jnp.sum(logits_BLV, axis=-1))


def _kernel_for(logits_BLV: jax.Array) -> Callable[..., Statistics] | None:
    """Returns a kernel per device; None without one, or if rows are sharded over the vocabulary."""
    device, mesh = tracing_device(), jax.sharding.get_abstract_mesh()
    kernel = annexes.get("logit_kernels", device.platform)
    batch_axis, vocab_axis = nn.logical_to_mesh_axes(("batch", "vocab")) or (None, None)
    if kernel is None or (vocab_axis and mesh.shape[vocab_axis] > 1):
        return None
    run: Callable[..., Statistics] | None = kernel(device, *logits_BLV.shape[1:])
    if run is None or mesh.empty or mesh.size == 1:
        return run
    own = PartitionSpec(batch_axis)
    # Kernels do not declare the axes over which their results vary.
    return jax.shard_map(run, in_specs=own, out_specs=own, check_vma=False)


def _target_and_rival(logits_BLV: jax.Array, targets_BL: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the target's logit and the highest other logit, each [B, L].

    Selecting the target by comparison instead of a gather fuses with other passes and supports a
    vocabulary sharded over devices.
    """
    is_target_BLV = _is_target(logits_BLV, targets_BL)
    target_BL = jnp.sum(jnp.where(is_target_BLV, logits_BLV, 0.0), axis=-1)
    return target_BL, jnp.max(jnp.where(is_target_BLV, -jnp.inf, logits_BLV), axis=-1)


def _is_target(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    return jnp.arange(logits_BLV.shape[-1]) == targets_BL[..., None]


def _summarise_forward(logits_BLV: jax.Array, targets_BL: jax.Array) -> tuple[Any, Any]:
    outputs = _summarise(logits_BLV, targets_BL)
    return outputs, (logits_BLV, targets_BL, outputs[0])


def _summarise_backward(residuals: Any, gradients: Any) -> tuple[Any, Any]:
    logits_BLV, targets_BL, log_z_BL = residuals
    log_z_gradient, target_gradient, sum_gradient = (g_BL[..., None] for g_BL in gradients[:3])
    softmax_BLV = jnp.exp(logits_BLV - log_z_BL[..., None])
    target_part_BLV = jnp.where(_is_target(logits_BLV, targets_BL), target_gradient, 0.0)
    return log_z_gradient * softmax_BLV + target_part_BLV + sum_gradient, None


_summarise.defvjp(_summarise_forward, _summarise_backward)
