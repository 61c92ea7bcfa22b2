"""A new optimizer is one module that registers it; nothing else knows its name."""

import sys

import jax
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.extending import example
from tests.support.runs import config_of, program_of, updated
from trainer.config.from_flags import build_config
from trainer.config.optimizer import OPTIMIZERS, Optimizer

# The optimizer's own file: gradient descent with momentum.
TOY = example("An optimizer")
B, L, V = 8, 16, 128
FLAGS = (
    "--optimizer.name=toy", "--optimizer.schedule=constant", "--optimizer.learning_rate=0.2",
    "--loss.normalizer=num_real_target_tokens", f"--model.vocab_size={V}", f"--batch_size={B}",
    f"--lengths.targets={L}",
)  # fmt: skip


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Registers the optimizer "toy", whose code is a file."""
    (tmp_path / "toy_optimizer.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    entry = Optimizer("toy_optimizer:direction", {"momentum": 0.5})
    monkeypatch.setattr(OPTIMIZERS, "own", {**OPTIMIZERS.own})
    OPTIMIZERS.register("toy", entry)
    yield
    sys.modules.pop("toy_optimizer", None)


def test_a_new_optimizer_trains(toy):
    targets = np.random.default_rng(0).integers(3, V, (B, L)).astype(np.int32)
    batch = {
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones((B, L), np.int32),
    }
    state, losses = updated(program_of(config_of(*FLAGS, preset="lm_tiny")), [batch] * 5)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_a_new_optimizer_has_the_checks_of_the_others(toy):
    with pytest.raises(
        UserError, match=r"beta2 has no effect with optimizer 'toy', which reads momentum"
    ):
        build_config("lm_tiny", [*FLAGS, "--optimizer.beta2=0.5"])
    with pytest.raises(UserError, match=r"momentum=1: it must be in \[0, 1\)"):
        build_config("lm_tiny", [*FLAGS, "--optimizer.momentum=1"])
    with pytest.raises(UserError, match="learning_rate: it must be set for 'toy'"):
        build_config("lm_tiny", ["--optimizer.name=toy"])


def test_an_optimizer_that_is_not_registered_is_unknown():
    with pytest.raises(UserError, match=r"--optimizer\.name=toy: it must be one of 'adafactor'"):
        build_config("lm_tiny", ["--optimizer.name=toy"])
