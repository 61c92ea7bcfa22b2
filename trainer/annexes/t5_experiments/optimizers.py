"""The optimizers of t5-experiments."""

from trainer.config.optimizer import PYTORCH_LOSS, OptimizerConfig, Recipe

# Source: yurakuratov/t5-experiments, README, "T5 Pre-training", and `run_t5_pretraining.py`:
# PyTorch's AdamW, which decays all tensors; the rate is constant without --lr_scheduler.
T5 = Recipe(
    OptimizerConfig(
        name="adamw",
        learning_rate=5e-5,
        schedule="constant",
        weight_decay=1e-5,
        no_weight_decay=(),
    ),
    PYTORCH_LOSS,
)
# Source: the defaults of `run_bert_pretraining.py` there. No page states a rate: this one is
# from `tests/test_bert_pretrain_train_valid.sh`, its only command for a dense BERT.
BERT = Recipe(
    OptimizerConfig(name="adamw", learning_rate=3e-4, schedule="constant", weight_decay=0.0),
    PYTORCH_LOSS,
)
