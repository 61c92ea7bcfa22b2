"""Everything that observes a run."""

import contextlib
from collections.abc import Iterator

from trainer.config import Config
from trainer.monitoring.activity import FAILED, Activity, running
from trainer.monitoring.command import Command
from trainer.monitoring.goodput import Goodput
from trainer.monitoring.hang import Hang


@contextlib.contextmanager
def observed(config: Config) -> Iterator[None]:
    """Observes the run that the block makes; one of another engine says nothing of itself."""
    if config.engine != "palimpsest":
        yield
        return
    activity = Activity()
    activity.process, activity.processes = config.processes.index or 0, config.processes.count or 1
    command = Command(activity, config.on_event, config.model_dir)
    goodput, complete = Goodput(activity, config.model_dir), False
    try:
        with running(activity), Hang(activity, config.hang_seconds):
            yield
        complete = True
    except Exception as error:
        activity.tell(FAILED, " ".join(str(error).split()) or type(error).__name__)
        raise
    finally:
        try:
            goodput.end(complete)  # stdout may be closed
        finally:
            command.end()
