"""Lion, from optax: the sign of an interpolation between momentum and gradient."""

import optax

from trainer.config.optimizer import OptimizerConfig
from trainer.optim.stacked import StackAxes


def direction(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    """Returns Lion's direction.

    Source: Chen et al. 2023 (arXiv:2302.06675).
    """
    return [optax.scale_by_lion(config.value("beta1"), config.value("beta2"))]
