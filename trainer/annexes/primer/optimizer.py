"""Primer's optimizer."""

from trainer.config.optimizer import OptimizerConfig, Recipe

# Source: google-research/primer README; 0.01 for 10,000 steps, then 1 / sqrt(step). Mesh TensorFlow
# divides the loss by all positions.
PRIMER = Recipe(
    OptimizerConfig(schedule="rsqrt_no_ramp_down"), {"normalizer": "num_total_target_tokens"}
)
