"""Bad updates: the run stops before them or skips them, with exactly the state before."""

import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import config_of, curve, flags_of, state
from tests.support.trees import assert_equal, same
from trainer.config.from_flags import build_config
from trainer.engine import each_array, guard
from trainer.engine.step import TrainState
from trainer.loop import train
from trainer.reporting.metrics import read_metrics
from trainer.setup import prepare


def step_of(config):
    """Returns a step that subtracts gradients from parameters; a batch is (gradient, loss)."""

    @jax.jit
    def step(state, batch):
        gradient, loss = batch
        gradients = {"a": jnp.float32(1.0), "b": jnp.full(3, gradient)}
        after = TrainState(
            step=state.step + 1,
            params=jax.tree.map(jnp.subtract, state.params, gradients),
            opt_state=(),
            metrics={"loss": (state.metrics["loss"][0] + loss, state.metrics["loss"][1] + 1)},
            guard=state.guard,
        )
        return guard.checked(state, after, gradients, (loss, jnp.float32(1.0)), config)

    return step


def start():
    zero = jnp.zeros(())
    return TrainState(
        step=jnp.int32(0), params={"a": zero, "b": jnp.zeros(3)}, opt_state=(),
        metrics={"loss": (zero, zero)}, guard=guard.new_guard(),
    )  # fmt: skip


def after(config, batches):
    step, state = step_of(config), start()
    for gradient, loss in batches:
        state = step(state, (jnp.float32(gradient), jnp.float32(loss)))
    return state


BAD = {
    "a gradient": ((np.nan, 5.0), "gradients/b is not finite"),
    "an infinite gradient": ((-np.inf, 5.0), "gradients/b is not finite"),
    "a loss": ((1.0, np.nan), "loss is not finite"),
    "an overflow": ((1e30, 5.0), "gradients/b is not finite"),
}


@pytest.mark.parametrize("case", BAD)
def test_stop_keeps_the_state_before_the_bad_update(case):
    batch, reason = BAD[case]
    config = config_of()
    good = [(1.0, 5.0), (2.0, 4.0)]
    stopped = after(config, [*good, batch, (1.0, 3.0), (np.nan, 3.0)])
    expected = after(config, good)
    assert guard.explain(stopped.guard, stopped.params, None) == reason
    stopped = dataclasses.replace(stopped, guard=guard.cleared(stopped.guard))
    assert_equal(stopped, expected)


@pytest.mark.parametrize("case", BAD)
def test_skip_skips_only_the_bad_update(case):
    config = config_of("--on_nan=skip")
    state = after(config, [(1.0, 5.0), BAD[case][0], (2.0, 4.0)])
    expected = after(config, [(1.0, 5.0), (2.0, 4.0)])
    assert (int(state.step), int(state.guard.skipped)) == (3, 1)
    assert int(state.guard.cause) == guard.NONE
    assert_equal((state.params, state.metrics), (expected.params, expected.metrics))


def test_parameters_that_were_not_finite_before_are_named():
    state = start()
    state = dataclasses.replace(state, params={**state.params, "b": jnp.array([0, np.inf, 0])})
    assert guard.explain(state.guard, state.params, None) == "parameters/b was not finite before it"
    assert int(guard.first_nonfinite({})) == -1


def test_a_spike_is_above_the_mean_of_the_last_hundred_steps():
    config = config_of("--spike_factor=2")
    calm = [(1.0, 5.0)] * 100
    assert int(after(config, [*calm[1:], (1.0, 50.0)]).guard.cause) == guard.NONE
    assert int(after(config, [*calm, (1.0, 9.9)]).guard.cause) == guard.NONE
    stopped = after(config, [*calm, (1.0, 10.1), (1.0, 5.0)])
    assert int(stopped.step) == 100
    says = "its loss is above 2 times the recent mean, 5.000"
    assert guard.explain(stopped.guard, stopped.params, 2.0) == says
    assert int(after(config_of(), [*calm, (1.0, 10.1)]).guard.cause) == guard.NONE
    skipped = after(config_of("--spike_factor=2", "--on_nan=skip"), [*calm, (1.0, 10.1)])
    assert int(skipped.guard.skipped) == 1


@pytest.mark.parametrize(
    ("cause", "updates", "flags", "says", "says_not"),
    [
        (3, 5, ("--model.dtype=float32",), "Lower --optimizer.learning_rate, or skip", "dtype"),
        (3, 5, ("--model.dtype=bfloat16",), "train with --model.dtype=float32, or skip", "first"),
        (3, 0, ("--model.dtype=float32",), "the model or its batch overflow even in", "Lower"),
        (3, 0, ("--init_from=x",), "the parameters of --init_from=x or its batch overf", "Lower"),
        (guard.SPIKE, 200, ("--spike_factor=2",), "raise --spike_factor, or skip", "float32"),
    ],
)
def test_advice_is_about_what_was_seen(cause, updates, flags, says, says_not):
    state = dataclasses.replace(guard.new_guard(), cause=cause, updates=updates)
    text = guard.advice(state, config_of(*flags))
    assert says in text
    assert says_not not in text


def run_of(cache, model_dir, bad, *flags):
    """Returns a run of 20 updates whose loss is NaN at the steps in `bad`."""
    given = flags_of(
        *(cache, model_dir, "--train_steps=20", "--metrics.every_steps=5"),
        *("--metrics.tensorboard=false", "--checkpoint.every_steps=10"),
        *("--evaluation.every_steps=0", *flags),
    )
    config, origins = build_config("t5_1_1_tiny", given)
    run = prepare(config, origins)
    batches = run.data.training

    def training(first, *args, **kwargs):
        for step, batch in zip(
            itertools.count(first + 1), batches(first, *args, **kwargs), strict=False
        ):
            weights = batch["decoder_loss_weights"] * np.float32(np.nan if step in bad else 1)
            yield {**batch, "decoder_loss_weights": weights}

    run.data.training = training
    return run, origins


def assert_same_runs(one, other):
    assert curve(one) == curve(other)
    assert same(state(one, 20), state(other, 20))


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_same_result(text_cache, tmp_path, capsys):
    good, stopped = tmp_path / "good", tmp_path / "stopped"
    norms = "--metrics.norms_every_steps=7"  # due after the update that is rejected
    assert train(*run_of(text_cache, good, (), norms)) == 0
    for _ in range(2):  # the same command stops at the same update again
        with pytest.raises(UserError, match=r"update 7 was rejected: gradients/\S+ is not finite"):
            train(*run_of(text_cache, stopped, {7}, norms))
        assert [path.name for path in stopped.glob("checkpoint_*")] == ["checkpoint_6"]
    assert [line["step"] for line in read_metrics(str(stopped))] == [5]
    assert train(*run_of(text_cache, stopped, (), norms)) == 0
    assert_same_runs(stopped, good)
    assert sum(line["split"] == "norms" for line in read_metrics(str(good))) == 3


@pytest.mark.processes
def test_a_state_that_is_not_finite_is_not_saved(text_cache, tmp_path, capsys):
    """AdamW divides 0 by 0 where a gradient is 0: the pieces of no batch so far."""
    flags = ("--optimizer.name=adamw", "--optimizer.epsilon=0")
    for _ in range(2):
        with pytest.raises(UserError, match=r"params/\S+ is not finite after update"):
            train(*run_of(text_cache, tmp_path, (), *flags, "--optimizer.learning_rate=0.001"))
    assert not list(tmp_path.glob("checkpoint_[1-9]*"))


@pytest.mark.slow
def test_skipped_updates_are_the_same_after_a_restart(text_cache, tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    bad = {7, 12, 13}
    assert train(*run_of(text_cache, whole, bad, "--on_nan=skip")) == 0
    for steps in (10, 20):
        flags = ["--on_nan=skip", f"--train_steps={steps}"]
        assert train(*run_of(text_cache, parts, bad, *flags)) == 0
    assert_same_runs(parts, whole)
    lines = read_metrics(str(whole))
    assert [line["metrics"]["skipped_updates"] for line in lines] == [0, 1, 3, 3]
    assert all(np.isfinite(line["metrics"]["loss"]) for line in lines)


@pytest.mark.processes
def test_skipping_every_update_is_an_error(text_cache, tmp_path, capsys):
    bad = set(range(6, 30))
    with pytest.raises(UserError, match="skipped every update since the last report, up to 10"):
        train(*run_of(text_cache, tmp_path / "model", bad, "--on_nan=skip"))


TREE = {
    "decoder": {"layers_0": {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(2)}},
    "encoder": {"kernel": jnp.ones((2, 2), jnp.bfloat16)},
    "step": jnp.int32(7),
}


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({}, None),
        ({"encoder": {"kernel": jnp.array([1, jnp.nan])}}, "encoder/kernel"),
        ({"encoder": {"kernel": jnp.array([-jnp.inf])}, "z": jnp.nan}, "encoder/kernel"),
        ({"decoder": {"layers_0": {"scale": jnp.array(jnp.nan)}}}, "decoder/layers_0/scale"),
    ],
)
def test_the_first_nonfinite_leaf_is_named(bad, name, on_host, monkeypatch):
    monkeypatch.setattr(each_array, "_is_on_host", lambda array: on_host)
    tree = jax.tree.map(jnp.asarray, {**TREE, **bad})
    index = jax.jit(guard.first_nonfinite)(tree)
    assert index.dtype == jnp.int32
    assert guard.leaf_name(tree, int(index)) == name
    state = types.SimpleNamespace(params=tree, opt_state={"count": jnp.int32(0)})
    assert guard.nonfinite(state) == (name and f"params/{name}")


def test_every_element_on_the_host_is_looked_at(monkeypatch):
    monkeypatch.setattr(guard, "_CHUNK", 4)
    for place in range(10):
        state = types.SimpleNamespace(
            params={"a": jnp.ones(10).at[place].set(jnp.inf)}, opt_state={}
        )
        assert guard.nonfinite(state) == "params/a"


def test_a_new_guard_warms_up_whatever_the_step(monkeypatch):
    monkeypatch.setattr(guard, "_MEMORY", 5)
    config = config_of("--spike_factor=3", "--on_nan=skip")
    step, state = step_of(config), dataclasses.replace(start(), step=jnp.int32(1000))
    for loss in (6.0, 4.0, np.nan, 4.0, 6.0):
        state = step(state, (jnp.float32(1.0), jnp.float32(loss)))
    # Nothing but the bad loss was skipped, and it does not count into the mean.
    assert (int(state.guard.skipped), int(state.guard.updates)) == (1, 4)
    assert float(state.guard.mean_loss) == 5.0
    for loss, skipped in ((5.0, 1), (16.0, 2)):
        state = step(state, (jnp.float32(1.0), jnp.float32(loss)))
        assert int(state.guard.skipped) == skipped
