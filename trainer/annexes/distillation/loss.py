"""The loss of a model that learns from a teacher's probabilities.

Dimensions: B batch, L length, V vocabulary.

Source: Hinton et al. 2015 (arXiv:1503.02531), section 2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tasks.terminal.command_line import UserError
from trainer.annexes.distillation.options import DistillationConfig
from trainer.config import Config, LossConfig
from trainer.engine.loss import ModelLoss, Scale, token_weights
from trainer.engine.metrics import Metrics
from trainer.model.transformer import Batch

# The feature of a batch with the teacher's logits [B, L, V] at the student's targets.
TEACHER_LOGITS = "teacher_logits"
_DIVERGENCE = "teacher_divergence"


def training_loss(own: ModelLoss, config: Config) -> ModelLoss:
    """Returns the loss of a run with a teacher; `own` is the model's own."""
    settings: DistillationConfig = config.distillation  # type: ignore[attr-defined]
    weight, temperature = settings.weight, settings.temperature

    def of_batch(
        output: Any, batch: Batch, loss_config: LossConfig, scale: Scale | None = None
    ) -> tuple[jax.Array, Metrics]:
        """Returns the mean of both losses, and metrics with the divergence in nats per target."""
        if TEACHER_LOGITS not in batch:
            raise UserError("--teacher: this command makes updates without one: leave it out")
        scale = scale or own.scale(batch, loss_config)
        loss, metrics = own.of_batch(output, batch, loss_config, scale)
        logits_BLV = getattr(output, "logits_BLV", output)
        divergence_BL = _divergence(logits_BLV, batch[TEACHER_LOGITS], temperature)
        weights_BL, counted_BL = token_weights(batch, own.side, loss_config)
        taught = temperature**2 * jnp.sum(divergence_BL * weights_BL) / scale.divisor
        mean = jnp.sum(divergence_BL * counted_BL), jnp.sum(counted_BL)
        return (1 - weight) * loss + weight * taught, {
            **metrics,
            _DIVERGENCE: jax.lax.stop_gradient(mean),
        }

    return ModelLoss(of_batch, (*own.metrics, _DIVERGENCE), own.side)


def _divergence(student_BLV: jax.Array, teacher_BLV: jax.Array, temperature: float) -> jax.Array:
    """Returns the divergence of the student's probabilities from the teacher's, [B, L]."""
    logits = (each.astype(jnp.float32) / temperature for each in (student_BLV, teacher_BLV))
    own_BLV, other_BLV = map(jax.nn.log_softmax, logits)
    return jnp.sum(jnp.exp(other_BLV) * (other_BLV - own_BLV), axis=-1)
