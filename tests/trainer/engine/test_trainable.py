"""Only what shall learn changes."""

import numpy as np
import pytest

from tasks.terminal.command_line import UserError
from tests.trainer.engine.test_sharding import batch_of, program_of
from trainer.model.paths import named

pytestmark = pytest.mark.processes

FLAGS = ("--model.num_decoder_layers=2", "--model.dropout_rate=0")


def numbers(tree):
    return {name: np.array(leaf) for name, leaf in named(tree).items()}


def changed(program, steps=3):
    """Returns (names of parameters that updates change, state after them)."""
    state = program.initial_state()
    before = numbers(state.params)
    for step in range(steps):
        state = program.train_step(state, batch_of(step))
    after = numbers(state.params)
    return {name for name in before if not np.array_equal(before[name], after[name])}, state


def test_only_parameters_by_name_learn_as_they_do_with_all_others():
    """The first update of a norm's scale is the same, whatever else learns."""
    program, alone = program_of(*FLAGS, "--trainable=scale$|^decoder/layers_1"), program_of(*FLAGS)
    moved, state = changed(program, steps=1)
    assert moved
    assert all(name.endswith("scale") or "decoder/layers_1" in name for name in moved)
    _, whole = changed(alone, steps=1)
    mine, theirs = numbers(state.params), numbers(whole.params)
    for name in moved:
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--trainable=nothing", "--trainable=nothing matches no parameter"),
        ("--trainable=(", "a regular expression"),
    ],
)
def test_mistakes_are_one_line(flag, says):
    with pytest.raises(UserError, match=says):
        program_of(*FLAGS, flag)
