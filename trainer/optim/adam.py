"""Adam, with and without T5's parameter scale, using optax's formulas."""

import optax

from trainer.config.optimizer import OptimizerConfig
from trainer.optim.stacked import StackAxes


def direction(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    """Returns Adam's direction; it is elementwise, so stacks need no special treatment."""
    beta1, beta2 = config.value("beta1"), config.value("beta2")
    return [optax.scale_by_adam(beta1, beta2, config.value("epsilon"))]
