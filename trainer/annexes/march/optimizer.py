"""MARCH's optimizer."""

from trainer.config.optimizer import PYTORCH_LOSS, OptimizerConfig, Recipe

# Source: bri25yu/march, `config/default_training_arguments.json`. It leaves epsilon, clipping and
# what does not decay (norms, and names with "bias") to the defaults of transformers' `Trainer`.
# Differences: DeepSpeed's schedule for no warm-up makes its first update with a rate of 0.
MARCH = Recipe(
    OptimizerConfig(
        name="adamw",
        learning_rate=1e-4,
        schedule="constant",
        clip_norm=1.0,
        weight_decay=0.1,
        no_weight_decay=(r"_norm/scale$", r"rel_embedding$"),
        beta2=0.95,
    ),
    PYTORCH_LOSS,
)
