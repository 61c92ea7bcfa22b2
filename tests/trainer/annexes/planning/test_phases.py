"""Plans of runs whose batches or lengths change."""

import pytest

from tasks.terminal.command_line import UserError
from tests.support.runs import flags_of
from tests.trainer.config.test_phases import LONGER
from trainer.config.from_flags import build_config


def test_the_largest_batch_is_planned(text_cache):
    from trainer.annexes.planning.planned_run import subject

    flags = ["--batch_schedule=3: 24; 1K: 12", "--train_tokens=4K"]
    for cache in (str(text_cache), ""):
        config, origins = build_config("t5_1_1_tiny", flags_of(cache, "nowhere", *flags))
        planned = subject(config, origins, 1)
        assert planned.rows == 24
        assert (planned.config.batch_schedule, planned.config.train_steps) == ("3: 24; 4: 12", 7)
    config, origins = build_config("t5_1_1_tiny", flags_of(text_cache, "nowhere", LONGER))
    with pytest.raises(UserError, match="--length_schedule: lengths are planned one by one"):
        subject(config, origins, 1)
