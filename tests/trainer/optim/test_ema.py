"""The exponential moving average equals its formula, whatever learns and whatever is skipped.

As a program it prints what updates on all devices leave, as JSON.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tasks.terminal.command_line import UserError
from tests.support import eight_devices
from tests.support.trees import assert_close, assert_equal
from tests.trainer.engine.test_sharding import SCANNED, batch_of, bytes_held, program_of, specs
from trainer.config import config_changes
from trainer.config.averages import AveragesConfig
from trainer.engine.sharding import put_batch
from trainer.model.paths import named
from trainer.optim.ema import average_in, is_of_average, with_average

DECAY, START = 0.8, 2
EMA = (f"--averages.ema_decay={DECAY}",)
LATE = (*EMA, f"--averages.ema_start_step={START}")
# Divided over eight devices: see `test_shares`.
LARGE = ("--model.vocab_size=512", "--model.emb_dim=128", "--model.mlp_dim=512")
MESHES = {
    "shares": LARGE,
    "scanned": ("--mesh.data=2", "--mesh.fsdp=2", "--mesh.tensor=2", *SCANNED),
}


def numbers(tree):
    return {name: np.array(leaf, np.float64) for name, leaf in named(tree).items()}


def averaged(program, state):
    return numbers(program.tuning.averaged(state.params, state.opt_state))


def updated(program, steps=6, broken=()):
    """Returns the state after each update; batches of `broken` steps have infinite losses."""
    state = program.initial_state()
    for step in range(steps):
        batch = batch_of(step)
        weights = batch["decoder_loss_weights"].astype(np.float32)
        batch["decoder_loss_weights"] = weights + np.float32(np.inf if step in broken else 0)
        state = program.train_step(state, put_batch(batch, program.mesh))
        yield state


def mean_of(history):
    """Returns the formula's mean, by a recursion in float64."""
    found, total = dict.fromkeys(history[0], 0.0), 0.0
    for params in history:
        found = {name: DECAY * found[name] + params[name] for name in params}
        total = DECAY * total + 1
    return {name: value / total for name, value in found.items()}


def assert_rounded(found, expected):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], rtol=2e-6, atol=5e-7)


@pytest.mark.processes
@pytest.mark.parametrize(
    "flags",
    [(), (*SCANNED, "--microbatches=2"), ("--lora.rank=2",), ("--trainable=mlp|scale$",)],
    ids=["plain", "scanned", "lora", "trainable"],
)
def test_the_average_is_that_of_the_formula(flags):
    program = program_of(*LATE, *flags)
    history = []
    for step, state in enumerate(updated(program), 1):
        history.append(numbers(state.params))
        expected = mean_of(history[START:]) if step > START else history[-1]
        assert_rounded(averaged(program, state), expected)
    of_average = named(state.opt_state[-1].average)
    learned = program.tuning.learned(state.params)
    assert of_average.keys() == named(learned).keys()
    assert all(leaf.dtype == np.float32 for leaf in of_average.values())
    # What does not learn is the parameters', to the bit.
    for name in history[-1].keys() - of_average.keys():
        np.testing.assert_array_equal(averaged(program, state)[name], history[0][name])


def test_up_to_its_first_update_the_average_is_the_parameters_to_the_bit():
    optimizer = with_average(optax.chain(optax.identity()), AveragesConfig(0.999, START))
    rng = np.random.default_rng(0)
    params = jnp.zeros(1000)
    state = optimizer.init(params)
    for step in range(1, START + 4):
        updates = jnp.float32(rng.normal(size=1000) * 10.0 ** rng.integers(-6, 6, 1000))
        updates, state = optimizer.update(updates, state, params)
        params = optax.apply_updates(params, updates)
        assert np.array_equal(average_in(state), params) == (step <= START + 1)


@pytest.mark.processes
def test_updates_are_those_of_a_run_without_an_average():
    with_one, without = ([*updated(program_of(*flags))][-1] for flags in (EMA, ()))
    # With most of XLA's optimisations off, as here, they are rounded differently.
    assert_close(with_one.params, without.params, atol=1e-5)
    assert_close(with_one.opt_state[:-1], without.opt_state, scale=1e-4)
    assert not any(map(is_of_average, named(without.opt_state)))
    assert {*named(with_one.opt_state)} - {*named(without.opt_state)} == {
        name for name in named(with_one.opt_state) if is_of_average(name)
    }


def test_a_skipped_update_does_not_move_the_average():
    program = program_of(*EMA, "--on_nan=skip")
    states = updated(program, 4, broken=(1, 3))
    history, averages = [], []
    for state in states:
        history.append(numbers(state.params))
        averages.append(averaged(program, state))
    assert int(state.guard.skipped) == 2
    assert_equal(averages[1], averages[0])
    assert_equal(averages[3], averages[2])
    assert int(state.opt_state[-1].clock.count) == 2
    assert_rounded(averages[2], mean_of([history[0], history[2]]))


def test_an_evaluation_of_the_average_compiles_nothing_new():
    program = program_of(*EMA)
    *_, state = updated(program, 3)
    own = program.evaluation_step(state.params, batch_of(0))
    found = program.evaluation_step(
        program.tuning.averaged(state.params, state.opt_state), batch_of(0)
    )
    assert found["loss"][0] != own["loss"][0]
    assert program.evaluation_step._cache_size() == 1


def results(*flags):
    program = program_of(*EMA, *flags)
    *_, state = updated(program)
    leaves = averaged(program, state)
    return {
        "rms": {name: float(np.sqrt((leaf**2).mean())) for name, leaf in leaves.items()},
        "average": specs(state.opt_state[-1].average),
        "params": specs(state.params),
        "held": bytes_held(state),
    }


@pytest.mark.processes
def test_averages_on_eight_devices_are_those_of_one():
    eight = eight_devices.run(__file__)
    assert jax.device_count() == 1
    for name, flags in MESHES.items():
        own = [flag for flag in flags if not flag.startswith("--mesh")]
        alone, found = results(*own), eight[name]
        assert found["average"] == found["params"]
        assert found["held"] < alone["held"] / 2
        for leaf, value in alone["rms"].items():
            assert found["rms"][leaf] == pytest.approx(value, rel=1e-4), leaf


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--averages.ema_decay=1",), "averages.ema_decay=1: it must be above 0 and below 1"),
        (("--averages.ema_decay=0",), "averages.ema_decay=0: it must be above 0 and below 1"),
        (("--averages.ema_start_step=5",), "has no effect without averages.ema_decay"),
        ((*EMA, "--averages.ema_start_step=-1"), "it must be 0 or more"),
        (
            (*EMA, "--train_steps=5", "--averages.ema_start_step=5"),
            "it must be below 5, the train_steps, or the average never begins",
        ),
        (("--checkpoint.best_metric=ema/loss",), "since --averages.ema_decay is not set"),
        (("--stopping.metric=min:ema/loss",), "since --averages.ema_decay is not set"),
    ],
)
def test_mistakes_are_one_line(flags, says):
    with pytest.raises(UserError, match=says):
        program_of(*flags)


def test_a_run_does_not_resume_with_another_average():
    config = program_of(*EMA).tuning._config
    without = dataclasses.replace(config, averages=type(config.averages)())
    assert config_changes(without, config, 3) == [f"averages.ema_decay was None, is {DECAY}"]


if __name__ == "__main__":
    print(json.dumps({name: results(*flags) for name, flags in MESHES.items()}))
