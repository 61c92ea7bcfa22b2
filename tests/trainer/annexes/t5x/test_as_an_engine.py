"""What --engine=t5x leaves without effect or refuses, without T5X."""

import pytest

from palimpsest.commands import COMMANDS, command
from tasks.terminal.command_line import UserError
from tasks.terminal.flags import parse
from tests.support.runs import config_of
from trainer.config.from_flags import origins_of


def test_flags_of_our_engine_have_no_effect():
    for flag in ("--hang_seconds=5", "--on_event=true"):
        with pytest.raises(
            UserError, match=f"^{flag.partition('=')[0]} has no effect with --engine=t5x"
        ):
            origins_of(config_of("--engine=t5x", flag))


def test_a_run_needs_no_flag_and_a_step_has_two_names():
    flags = command(COMMANDS["export_t5x"]).flags
    for word in ("--step=3", "--steps=3"):
        values = parse(flags, ["folder", "--output=x", word]).values
        assert (values["model_dir"], values["step"]) == ("folder", 3)
