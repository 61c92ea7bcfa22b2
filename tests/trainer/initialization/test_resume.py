"""A finished run is continued with a higher rate only if its user agrees."""

import pytest

from tasks import annexes
from tasks.terminal.command_line import UserError
from tests.support.runs import config_of, stub
from trainer.initialization.resume import _check_rate, _compared

COSINE = ("--optimizer.schedule=constant * cosine_decay", "--optimizer.steps_per_cycle=99")
COSINE += ("--optimizer.warmup_steps=1",)


def test_a_second_cycle_is_refused_unless_agreed():
    before, now = (config_of(*COSINE, f"--train_steps={steps}") for steps in (100, 200))
    with pytest.raises(UserError, match="at update 101, which undoes") as caught:
        _check_rate(before, now)
    assert "planned for 100 updates" in str(caught.value)
    _check_rate(before, before)
    _check_rate(now, before)
    _check_rate(before, config_of(*COSINE, "--train_steps=100", "--rate_may_rise"))
    _check_rate(before, config_of(*COSINE, "--train_steps=200", "--rate_may_rise=true"))


def test_a_run_in_cycles_goes_on():
    before, now = (config_of(*COSINE, f"--train_steps={steps}") for steps in (200, 400))
    _check_rate(before, now)


def test_a_model_that_cannot_be_exported_says_so_at_the_start(monkeypatch):
    monkeypatch.setattr(annexes, "every", lambda slot: [lambda source: "compared"])
    plain = config_of("--init_from=hf:folder")
    assert _compared(stub(plain)) == "; compared"
    other = config_of("--init_from=hf:folder", "--model.query_key_norm=true")
    said = _compared(stub(other))
    assert said.startswith("; compared; trainer.export cannot write this model: ")
    assert "query_key_norm" in said
    assert _compared(stub(config_of())) == ""
