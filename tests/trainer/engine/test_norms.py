"""Norms are those of the update that follows, which is the same with them and without."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.engine.test_sharding import batch_of, bits, program_of
from trainer.model.layers import stack_layers
from trainer.model.paths import named

pytestmark = pytest.mark.processes

FLAGS = ["--model.num_decoder_layers=2", "--model.dropout_rate=0"]


def norms_of(program, state, step=0):
    return program.norms.by_name(program.norms(state, batch_of(step)))


def rms(tree):
    return {name: np.sqrt(np.mean(np.square(leaf))) for name, leaf in named(tree).items()}


def numbers(tree):
    return jax.tree.map(np.array, tree)  # copies: the step donates its state


def test_norms_are_those_of_the_update_that_follows():
    program = program_of(*FLAGS, "--model.dropout_rate=0.1")
    state = program.initial_state()
    before = numbers(state.params)
    found = norms_of(program, state)
    after = program.train_step(state, batch_of(0))
    params = numbers(after.params)
    assert len(found) == 3 * len(named(params))
    for name, value in rms(params).items():
        assert found[f"weight_rms/{name}"] == pytest.approx(value, rel=1e-5), name
    for name, value in rms(jax.tree.map(np.subtract, params, before)).items():
        assert found[f"weight_update_rms/{name}"] == pytest.approx(value, rel=1e-3), name
    squares = sum(
        leaf.size * found[f"weight_gradient_rms/{name}"] ** 2
        for name, leaf in named(params).items()
    )
    norm = float(after.metrics["gradient_norm"][0])
    assert np.sqrt(squares) == pytest.approx(norm, rel=1e-5)


def test_a_scanned_model_has_the_norms_of_the_unscanned_one():
    alone, scanned = program_of(*FLAGS), program_of(*FLAGS, "--model.scan_layers=true")
    params = alone.initial_state().params
    # Unlike layers, so that mixing them up is noticed.
    params["decoder"]["layers_1"] = jax.tree.map(lambda x: 3 * x, params["decoder"]["layers_1"])
    stacked = scanned.state_of(jax.tree.map(jnp.copy, stack_layers(params)), 0)
    found, expected = norms_of(scanned, stacked), norms_of(alone, alone.state_of(params, 0))
    assert found.keys() == expected.keys()
    assert "weight_rms/decoder/layers_1/mlp/wo/kernel" in found
    assert found == pytest.approx(expected, rel=2e-4, abs=1e-9)


def test_norms_change_neither_the_program_nor_the_bits():
    flags = [*FLAGS, "--model.dropout_rate=0.1"]  # a program that another test compiles, too
    without, program = program_of(*flags), program_of(*flags, "--metrics.norms_every_steps=1")

    def text(program):
        return program.train_step.lower(program.abstract_state(), batch_of(0)).as_text()

    assert text(program) == text(without)
    states = [without.initial_state(), program.initial_state()]
    for step in range(3):
        norms_of(program, states[1], step)
        states = [without.train_step(states[0], batch_of(step)),
                  program.train_step(states[1], batch_of(step))]  # fmt: skip
    assert bits(states[0]) == bits(states[1])


def test_a_rejected_update_has_its_gradients_and_the_weights_before_it():
    program = program_of(*FLAGS, "--on_nan=skip")
    state = program.initial_state()
    norm = state.params["decoder"]["decoder_norm"]
    norm["scale"] = norm["scale"].at[0].set(jnp.nan)
    found = norms_of(program, state)
    assert found["weight_rms/decoder/layers_0/mlp/wo/kernel"] > 0
    assert np.isnan(found["weight_gradient_rms/decoder/layers_0/mlp/wo/kernel"])
