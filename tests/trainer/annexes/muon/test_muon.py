"""Muon against float64 numpy written from the paper, in stacks of layers, and with muP."""

import jax
import numpy as np
import pytest

from tests.trainer.engine.test_sharding import assert_placed
from tests.trainer.optim.test_mup import DECODER, RATE, assert_scanned, update_of
from tests.trainer.optim.test_optimizer import (
    GRADIENTS,
    PARAMS,
    RATES,
    adamw,
    assert_stacked,
    assert_steps,
    rms,
    spared,
    train,
)
from trainer.config.optimizer import OptimizerConfig

FIELDS = {"name": "muon", "weight_decay": 0.1}


def muon(p, gradients, *, momentum=0.95, scaled=True, decay=0.0):
    m = 0.0
    for step, g in enumerate(gradients):
        m = momentum * m + (1 - momentum) * g
        # Nesterov's look ahead, each part corrected for its own bias.
        ahead = momentum * m / (1 - momentum ** (step + 2))
        x = ahead + (1 - momentum) * g / (1 - momentum ** (step + 1))
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        u = 0.2 * np.sqrt(max(p.shape)) * x * (max(rms(p), 1e-3) if scaled else 1.0)
        p = p - RATES[step] * (u + decay * p)
    return p


def is_hidden_matrix(name):
    return name.endswith("kernel") and "logits" not in name


def reference(name):
    if is_hidden_matrix(name):
        return muon, {"decay": 0.1}
    return adamw, {"betas": (0.9, 0.95), "scaled": True, "decay": 0.0 if spared(name) else 0.1}


@pytest.mark.parametrize("clip_norm", [None, 2.0])
def test_steps_are_those_of_the_paper(clip_norm):
    assert_steps(FIELDS, reference, clip_norm)


@pytest.mark.processes
def test_a_stack_of_layers_is_updated_as_its_layers_are():
    assert_stacked(FIELDS)
    assert_scanned("muon")


def test_matrices_have_one_moment():
    _, state = train(OptimizerConfig(name="muon", learning_rate=0.1), PARAMS, GRADIENTS[:2])
    size = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 3)
    matrices = sum(each.size for name, each in PARAMS.items() if is_hidden_matrix(name))
    assert size == 2 * sum(each.size for each in PARAMS.values()) - matrices


def test_its_state_is_placed_like_parameters():
    assert_placed("muon")


@pytest.mark.parametrize("by_size", [False, True])
def test_muon_falls_as_the_root_of_the_width(by_size):
    found = update_of(DECODER, name="muon", multiply_by_parameter_scale=by_size)
    param, _, update = found["hidden"]
    relative = np.sqrt((update**2).mean()) / 0.01 / 0.2
    if by_size:
        relative /= np.sqrt((param**2).mean())
    assert relative == pytest.approx(1.0 if by_size else RATE**0.5, rel=0.1)
