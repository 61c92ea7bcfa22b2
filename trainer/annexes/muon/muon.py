"""Muon: orthogonalised momentum for matrices, Adam for all other tensors.

Source: Jordan 2024, github.com/KellerJordan/Muon; Liu et al. 2025 (arXiv:2502.16982).
"""

import math
import re
from typing import Any

import jax
import optax
from optax import contrib

from trainer.config.optimizer import OptimizerConfig
from trainer.model.paths import path_name
from trainer.optim import adam
from trainer.optim.stacked import StackAxes

Tree = Any

# Root mean square of Adam's updates, to which Muon's are scaled. Source: Liu et al. 2025
# (arXiv:2502.16982), section 2.2.
_ADAM_RMS = 0.2
# Newton-Schulz steps. Source: Jordan 2024, github.com/KellerJordan/Muon.
_ORTHOGONALISATION_STEPS = 5
# Matrices left to Adam: embedding tables and the logits.
_LEFT_TO_ADAM = re.compile("embedding$|logits_dense/kernel$")


def _is_matrix(path: str, own_axes: int) -> bool:
    return own_axes == 2 and not _LEFT_TO_ADAM.search(path)


def rate_exponent(path: str, own_axes: int) -> float:
    """Returns the exponent of muP's Adam rate that a tensor needs: 1/2 for Muon's matrices.

    The spectral norm of an update must not grow with width. Adam's updates, with aligned
    elements, grow with width; orthogonalised ones of the same size, only with its square root.

    Source: Yang, Simon and Bernstein 2023 (arXiv:2310.17813), section 3.
    """
    return 0.5 if _is_matrix(path, own_axes) else 1.0


def direction(config: OptimizerConfig, stacked: StackAxes) -> list[optax.GradientTransformation]:
    """Returns Muon's direction for matrices and Adam's for other tensors, at the same RMS."""

    def matrix(path: tuple, tensor: jax.Array) -> contrib.MuonDimensionNumbers | None:
        own = [axis for axis in range(tensor.ndim) if axis not in stacked(path)]
        if not _is_matrix(path_name(path), len(own)):
            return None
        return contrib.MuonDimensionNumbers((own[0],), (own[1],))

    def matrices(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(matrix, params)

    def resize(path: tuple, update: jax.Array) -> jax.Array:
        larger = max(size for axis, size in enumerate(update.shape) if axis not in stacked(path))
        return update * _ADAM_RMS * math.sqrt(larger)

    def labels(params: Tree) -> Tree:
        return jax.tree_util.tree_map_with_path(
            lambda path, tensor: "adam" if matrix(path, tensor) is None else "muon", params
        )

    muon = optax.chain(
        contrib.scale_by_muon(
            ns_steps=_ORTHOGONALISATION_STEPS,
            beta=config.value("momentum"),
            weight_dimension_numbers=matrices,
        ),
        optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(resize, updates)),
    )
    others = optax.chain(*adam.direction(config, stacked))
    return [optax.partition({"muon": muon, "adam": others}, labels)]
