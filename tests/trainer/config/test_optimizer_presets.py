"""The optimizers of published systems have the numbers of their pages and code."""

import numpy as np
import pytest

from tests.support.cases import entries
from trainer.config.from_flags import build_config
from trainer.optim.schedule import learning_rate_schedule

SEEDS = {
    # lucaslingle/mu_transformer, `configs/base.py`, `launch.py`; learning rate: README.
    "mu_transformer": {
        **{"optimizer.name": "adamw", "optimizer.learning_rate": 0.03, "optimizer.beta1": 0.9},
        **{"optimizer.beta2": 0.95, "optimizer.epsilon": 1e-8, "optimizer.weight_decay": 0},
        **{"optimizer.clip_norm": 1.0, "loss.normalizer": "num_total_target_tokens"},
        "loss.z_loss": 0,
    },
    # dumitrescustefan/t5x_models, `ro_t5x_base_pretrain.gin`, and T5X's defaults.
    "romanian_t5x": {
        **{"optimizer.name": "adafactor", "optimizer.learning_rate": 1.0, "optimizer.beta1": 0},
        **{"optimizer.decay_rate": 0.8, "optimizer.epsilon": 1e-30, "optimizer.weight_decay": 0},
        **{"optimizer.clip_norm": None, "loss.normalizer": "sum", "loss.z_loss": 1e-4},
    },
    **entries("OPTIMIZER_SEEDS"),
}
# Rates of updates, by step: for mu_transformer the two lines of `schedule_factory` times 0.03.
RATES = {
    "mu_transformer": {
        **{0: 3e-6, 5_000: 0.0150015, 10_000: 0.03, 67_500: 0.0150015},
        **{124_999: 3.26e-6, 125_000: 3e-6, 200_000: 3e-6},
    },
    "romanian_t5x": {0: 0.01, 10_000: 0.01, 1_000_000: 1e-3, 2_000_000: 7.0711e-4},
    **entries("OPTIMIZER_RATES"),
}


@pytest.mark.parametrize("name", SEEDS)
def test_recipes_of_the_seeds_have_their_numbers(name):
    config, _ = build_config("t5_1_1_small", [], name)
    for path, value in SEEDS[name].items():
        part, field = path.split(".")
        read = config.optimizer.value if part == "optimizer" else config.loss.__getattribute__
        assert read(field) == value, path
    steps = np.array([*RATES[name]])
    rates = np.broadcast_to(learning_rate_schedule(config.optimizer)(steps), steps.shape)
    np.testing.assert_allclose(rates, [*RATES[name].values()], rtol=1e-3)
