"""Parts of the other slots defined outside of the package: their code and a registration each."""

import sys
import types
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from tests.support.extending import example
from tests.trainer.model.conftest import tiny_config
from trainer.config.from_flags import build_config
from trainer.engine.program import Program
from trainer.model.parts import SLOTS
from trainer.model.spec import model_spec
from trainer.model.transformer import parameter_facts

PARTS = {
    "norm": "magnitude",
    "position": "ramp",
    "feed_forward": "sines:width=16",
    "parametrisation": "small",
    "parallel_blocks": "halved",
}


@pytest.fixture(scope="module", autouse=True)
def module():
    module = types.ModuleType("new_parts")
    sys.modules[module.__name__] = module  # where dataclasses look up types
    exec(example("Other parts of a model"), vars(module))
    yield module
    del sys.modules[module.__name__]
    for slot, name in PARTS.items():
        del SLOTS[slot][name.partition(":")[0]]


def test_a_model_of_them_trains():
    flags = [f"--model.{slot}={name}" for slot, name in PARTS.items()]
    flags += ["--model.vocab_size=40", "--batch_size=2", "--optimizer.name=adamw"]
    flags += ["--optimizer.learning_rate=0.01", "--optimizer.schedule=constant"]
    program = Program(SimpleNamespace(config=build_config("lm_tiny", flags)[0]))
    state, losses = program.initial_state(), []
    tokens = jnp.tile(jnp.arange(1, 7), (2, 1))
    batch = {
        "decoder_input_tokens": jnp.roll(tokens, 1, axis=1).at[:, 0].set(0),
        "decoder_target_tokens": tokens,
        "decoder_loss_weights": jnp.ones_like(tokens),
    }
    for _ in range(20):
        state = program.train_step(state.replace(metrics=program.zero_metrics()), batch)
        total, weight = state.metrics["loss"]
        losses.append(float(total / weight))
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("slot", "name"), PARTS.items())
def test_each_fits_a_model_by_itself(slot, name):
    assert parameter_facts(model_spec(tiny_config("lm", **{slot: name})))


def test_their_options_are_checked():
    with pytest.raises(ValueError, match="a part whose width is above 0"):
        tiny_config("lm", feed_forward="sines:width=0")
