"""Profiles of a few updates, for XProf and Perfetto."""

from __future__ import annotations

from typing import Any

import jax

from tasks.storage import files
from trainer.config import Config
from trainer.engine.step import TrainState


class Profile:
    """Traces the updates in `config.profile_steps` into `model_dir/profile`.

    model_dir has to be local: the profiler cannot write to a remote one.
    """

    def __init__(self, config: Config):
        self._updates = config.profiled
        self._folder = files.join(config.model_dir, "profile")
        self._tracing = False

    def before(self, step: int) -> None:
        """Starts the trace before the first of the updates."""
        if not self._tracing and step in self._updates:
            jax.profiler.start_trace(files.local_path(self._folder), create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, state: TrainState) -> None:
        """Ends the trace after the last of the updates, once the device has finished it."""
        if self._tracing and step == self._updates[-1]:
            jax.block_until_ready(state)
            self._end()

    def _end(self) -> None:
        self._tracing = False
        jax.profiler.stop_trace()

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._tracing:
            self._end()
