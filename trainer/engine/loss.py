"""The training loss and the metrics that come with it.

Dimensions: B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trainer.config import LossConfig
from trainer.engine.metrics import Metrics
from trainer.model.transformer import Batch, Encoder, Predictions, RoutedLogits, Transformer


class Scale(NamedTuple):
    """What sums over a batch are divided by: scalars that depend on no parameter.

    `divisor` is the normaliser's, of the sum over tokens. `weight` is the sum of the tokens'
    weights and `rows` the number of rows with tokens; only the loss of rows needs them.
    """

    divisor: jax.Array | float
    weight: jax.Array | float
    rows: jax.Array | float


class ModelLoss(NamedTuple):
    """The loss of a kind of model.

    `of_batch` maps (output of the model, batch, LossConfig) to (the scalar to differentiate,
    metrics), `metrics` are the names of the latter. `scale` maps (batch, LossConfig) to a Scale,
    which may be given to `of_batch`, last: with the scale of a whole batch, the losses of the parts
    that its rows are divided into add up to its loss.
    """

    of_batch: Callable[..., tuple[jax.Array, Metrics]]
    metrics: tuple[str, ...]
    scale: Callable[[Batch, LossConfig], Scale]


def decoder_scale(batch: Batch, config: LossConfig) -> Scale:
    """The scale of `decoder_loss`."""
    return _side_scale(batch, "decoder", config)


def decoder_loss(
    logits_BLV: jax.Array, batch: Batch, config: LossConfig, scale: Scale | None = None
) -> tuple[jax.Array, Metrics]:
    """`loss_and_metrics` of the decoder's features; `scale` None is the batch's own."""
    scale = scale or decoder_scale(batch, config)
    return _side_loss(logits_BLV, batch, "decoder", config, scale)


def routed_loss(
    output: RoutedLogits, batch: Batch, config: LossConfig, scale: Scale | None = None
) -> tuple[jax.Array, Metrics]:
    """`decoder_loss`, plus the auxiliary loss of Switch layers.

    To the mean loss over tokens that the normaliser makes it is added as it is, and where that
    leaves a multiple of the mean, the same multiple of it. Metrics `auxiliary_loss`, a batch's or a
    microbatch's, and `dropped_tokens`, the share of tokens that found their expert full.

    Source: Mesh TensorFlow, `moe.py`, where the multiple is that of
    "num_total_target_tokens".
    """
    scale = scale or decoder_scale(batch, config)
    loss, metrics = decoder_loss(output.logits_BLV, batch, config, scale)
    routing, own = output.routing, decoder_scale(batch, config)
    loss += own.weight / scale.divisor * routing.auxiliary
    of_routing = {
        "auxiliary_loss": (routing.auxiliary, jnp.ones(())),
        "dropped_tokens": (routing.dropped, routing.routed),
    }
    return loss, {**metrics, **jax.lax.stop_gradient(of_routing)}


def encoder_scale(batch: Batch, config: LossConfig) -> Scale:
    """The scale of `encoder_loss`."""
    return _side_scale(batch, "encoder", config)


def encoder_loss(
    predictions: Predictions, batch: Batch, config: LossConfig, scale: Scale | None = None
) -> tuple[jax.Array, Metrics]:
    """`loss_and_metrics` of the encoder's features, plus the loss of the order of sentences.

    To the mean loss over tokens that the normaliser makes, the mean cross entropy over rows is
    added as it is: BERT's sum of two means. Where the normaliser leaves a multiple of that mean,
    the same multiple is added. A row without tokens has no order; without `sentence_order` in the
    batch no row has one.

    Metrics `order_loss` (nats) and `order_accuracy` are weighted by rows; the others are of tokens
    alone. `scale` None is the batch's own.

    Source: google-research/bert, `run_pretraining.py`.
    """
    scale = scale or encoder_scale(batch, config)
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
    return jnp.any(batch["encoder_input_tokens"] > 0, axis=-1).astype(jnp.float32)


def _side_scale(batch: Batch, side: str, config: LossConfig) -> Scale:
    weights_BL, divisor = _normalise(
        batch[f"{side}_loss_weights"].astype(jnp.float32), config, batch.get(f"{side}_segment_ids")
    )
    rows = jnp.sum(_has_tokens(batch)) if side == "encoder" else 0.0
    return Scale(divisor, jnp.sum(weights_BL), rows)


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


def sequence_accuracy(output: jax.Array | RoutedLogits | Predictions, batch: Batch) -> Metrics:
    """Of rows with targets, those whose every target is ranked first; {} for an encoder alone."""
    if isinstance(output, Predictions):
        return {}
    logits_BLV = output.logits_BLV if isinstance(output, RoutedLogits) else output
    counted_BL = batch["decoder_loss_weights"] > 0
    correct_BL = jnp.argmax(logits_BLV, axis=-1) == batch["decoder_target_tokens"]
    counted_B = jnp.any(counted_BL, axis=-1)
    whole_B = counted_B & jnp.all(correct_BL | ~counted_BL, axis=-1)
    return {
        "sequence_accuracy": (
            jnp.sum(whole_B).astype(jnp.float32),
            jnp.sum(counted_B).astype(jnp.float32),
        )
    }


def model_loss(model: Transformer | Encoder) -> ModelLoss:
    """The loss that goes with what `model` puts out."""
    token_metrics = ("loss", "z_loss", "accuracy")
    if isinstance(model, Encoder):
        names = (*token_metrics, "order_loss", "order_accuracy")
        return ModelLoss(encoder_loss, names, encoder_scale)
    if model.spec.routed:
        names = (*token_metrics, "auxiliary_loss", "dropped_tokens")
        return ModelLoss(routed_loss, names, decoder_scale)
    return ModelLoss(decoder_loss, token_metrics, decoder_scale)


def loss_and_metrics(
    logits_BLV: jax.Array,
    targets_BL: jax.Array,
    weights_BL: jax.Array,
    config: LossConfig,
    segment_ids_BL: jax.Array | None = None,
    divisor: jax.Array | float | None = None,
) -> tuple[jax.Array, Metrics]:
    """The scalar to differentiate, and metrics as float32 (sum, weight) pairs.

    `targets_BL` are int token ids, `weights_BL` what each position counts for (0: not at all).
    `segment_ids_BL` says which sequences share a row, 0 none; only "average_per_sequence" reads
    it, and takes a row for one sequence without it. `divisor` None is what the normaliser makes of
    these weights; of a part of a batch it is that of the whole.

    Metrics, all weighted by `weights_BL` and none touched by the normaliser:
    `loss`, cross entropy in nats, without z-loss; `z_loss`; `accuracy`, targets ranked first.

    Source: google-research/t5x, `losses.py`.
    Differences: the `loss` metric is that of unsmoothed targets, comparable between runs that
    smooth labels and runs that do not; T5X reports the smoothed one.
    """
    logits_BLV = logits_BLV.astype(jnp.float32)
    weights_BL = weights_BL.astype(jnp.float32)
    log_z_BL, target_logit_BL, logit_sum_BL = _summarise(logits_BLV, targets_BL)
    cross_entropy_BL = log_z_BL - target_logit_BL
    z_loss_BL = config.z_loss * jnp.square(log_z_BL)

    loss_BL = cross_entropy_BL
    if config.label_smoothing > 0:
        vocab_size = logits_BLV.shape[-1]
        confidence = 1.0 - config.label_smoothing
        rest = config.label_smoothing / (vocab_size - 1)
        loss_BL = log_z_BL - (confidence - rest) * target_logit_BL - rest * logit_sum_BL
        # The entropy of the smoothed target: subtracted, a perfect model's loss is 0.
        loss_BL -= -confidence * math.log(confidence) - config.label_smoothing * math.log(rest)

    loss_weights_BL, own_divisor = _normalise(weights_BL, config, segment_ids_BL)
    divisor = own_divisor if divisor is None else divisor
    loss = jnp.sum((loss_BL + z_loss_BL) * loss_weights_BL) / divisor

    weight = jnp.sum(weights_BL)
    correct_BL = jnp.argmax(logits_BLV, axis=-1) == targets_BL
    metrics = {
        "loss": (jnp.sum(cross_entropy_BL * weights_BL), weight),
        "z_loss": (jnp.sum(z_loss_BL * weights_BL), weight),
        "accuracy": (jnp.sum(correct_BL * weights_BL), weight),
    }
    return loss, jax.lax.stop_gradient(metrics)


def _normalise(
    weights_BL: jax.Array, config: LossConfig, segment_ids_BL: jax.Array | None
) -> tuple[jax.Array, jax.Array | float]:
    """What each token's loss is multiplied by, and what the sum is divided by."""
    if config.normalizer == "num_real_target_tokens":
        return weights_BL, jnp.sum(weights_BL)
    if config.normalizer == "num_total_target_tokens":
        return weights_BL, float(weights_BL.size)
    if config.normalizer == "average_per_sequence":
        if segment_ids_BL is None:
            totals_BL = jnp.sum(weights_BL, axis=-1, keepdims=True)
        else:
            totals_BL = _sum_over_segment(weights_BL, segment_ids_BL)
        # A sequence whose weights are all 0 has no share, rather than a NaN.
        shares_BL = jnp.where(totals_BL > 0, weights_BL / jnp.where(totals_BL > 0, totals_BL, 1), 0)
        return shares_BL, jnp.sum(shares_BL)
    return weights_BL, config.normalizing_constant or 1.0


def _sum_over_segment(weights_BL: jax.Array, segment_ids_BL: jax.Array) -> jax.Array:
    """At each position, the sum of weights over its own segment of the row."""
    # A row of L positions holds at most L segments, numbered from 1.
    num_segments = weights_BL.shape[1] + 1

    def one_row(weights_L: jax.Array, segment_ids_L: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(weights_L, segment_ids_L, num_segments)[segment_ids_L]

    return jax.vmap(one_row)(weights_BL, segment_ids_BL)


@jax.custom_vjp
def _summarise(
    logits_BLV: jax.Array, targets_BL: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """log(sum(exp(logits))), the target's logit and the sum of logits, each float32 [B, L].

    Every loss here is a function of these three. Their gradient is written out because it needs
    nothing from the forward pass but logits and log Z: automatic differentiation would keep a
    second array of [B, L, V]. The target's logit is picked by comparison, not by a gather, so
    that it fuses with the other passes and works unchanged on a vocabulary split over devices.
    """
    maximum_BL1 = jnp.max(logits_BLV, axis=-1, keepdims=True)
    sum_exp_BL = jnp.sum(jnp.exp(logits_BLV - maximum_BL1), axis=-1)
    log_z_BL = jnp.log(sum_exp_BL) + maximum_BL1[..., 0]
    target_logit_BL = jnp.sum(
        jnp.where(_is_target(logits_BLV, targets_BL), logits_BLV, 0.0), axis=-1
    )
    return log_z_BL, target_logit_BL, jnp.sum(logits_BLV, axis=-1)


def _is_target(logits_BLV: jax.Array, targets_BL: jax.Array) -> jax.Array:
    return jnp.arange(logits_BLV.shape[-1]) == targets_BL[..., None]


def _summarise_forward(logits_BLV, targets_BL):
    outputs = _summarise(logits_BLV, targets_BL)
    return outputs, (logits_BLV, targets_BL, outputs[0])


def _summarise_backward(residuals, gradients):
    logits_BLV, targets_BL, log_z_BL = residuals
    log_z_gradient, target_gradient, sum_gradient = (g_BL[..., None] for g_BL in gradients)
    softmax_BLV = jnp.exp(logits_BLV - log_z_BL[..., None])
    target_part_BLV = jnp.where(_is_target(logits_BLV, targets_BL), target_gradient, 0.0)
    return log_z_gradient * softmax_BLV + target_part_BLV + sum_gradient, None


_summarise.defvjp(_summarise_forward, _summarise_backward)
