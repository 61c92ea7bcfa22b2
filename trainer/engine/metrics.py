"""Metrics as weighted sums, additive over batches, microbatches and devices."""

import math
from typing import Any

import jax

# Metric name -> (sum, weight), float32 scalars: add over batches, divide to print.
Metrics = dict[str, tuple[jax.Array, jax.Array]]


def means(metrics: dict[str, tuple[Any, Any]]) -> dict[str, float]:
    """Returns sum / weight of each metric as a Python float; waits for the device."""
    return {
        name: float(total) / max(float(weight), 1e-30) for name, (total, weight) in metrics.items()
    }


def perplexity(loss: float) -> float:
    """Returns exp(loss), or infinity on overflow."""
    return math.exp(loss) if loss < 700 else math.inf
