"""Flags that became options of parts are refused with their replacement."""

import pytest

from tasks.terminal.command_line import UserError
from trainer.config import from_flags


def test_a_former_flag_is_refused_with_its_replacement():
    flag, replacement = (
        "model.num_experts",
        "--model.feed_forward=switch:experts=8,every=2,capacity=64",
    )
    with pytest.raises(UserError) as refused:
        from_flags.given([f"--{flag}=4"])
    advice = f"unknown flag --{flag} (it is a"
    assert str(refused.value).startswith(advice)
    assert f": {replacement})" in str(refused.value)
    assert from_flags.given([replacement])
