"""Profiles of a few updates, for XProf, TensorBoard and Perfetto."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import jax

from tasks.storage import files, retries
from trainer.config import Config
from trainer.engine import processes
from trainer.engine.step import TrainState


class Profile:
    """Writes traces of updates in `config.profile_steps` to `model_dir/profile`, even if remote.

    Each process writes `plugins/profile/TIME/HOST.xplane.pb` there; all share TIME, so that XProf
    shows one session. A failing trace only prints a warning.
    """

    def __init__(self, config: Config):
        self._updates, self._given = config.profiled, config.profile_steps
        self._folder = files.join(config.model_dir, "profile")
        self._session = ""
        self._local: tempfile.TemporaryDirectory | None = None

    def update(self, step: int) -> AbstractContextManager:
        """Returns a context for an update; the trace begins before the first update to trace."""
        if not self._session and step in self._updates:
            # The processes agree on a name even if one of them cannot trace.
            self._session = processes.gathered(time.strftime("%Y_%m_%d_%H_%M_%S"))[0]
            with self._warning():
                self._begin()
        if self._local is None:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def after(self, step: int, state: TrainState) -> None:
        """Ends the trace after the last update, once the device has finished it."""
        if self._local and step == self._updates[-1]:
            jax.block_until_ready(state)
            self._end()

    def _begin(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.session_id = self._session
        local = tempfile.TemporaryDirectory(prefix="palimpsest-profile-")
        jax.profiler.start_trace(local.name, create_perfetto_trace=True, profiler_options=options)
        self._local = local

    def _end(self) -> None:
        local, self._local = self._local, None
        assert local is not None
        with self._warning(), local:
            try:
                jax.profiler.stop_trace()
            finally:
                # Only Perfetto's file, which is written last, may be missing.
                self._copy(local.name)

    def _copy(self, local: str) -> None:
        # The profiler names files after hosts, which several processes may share.
        prefix = f"process_{jax.process_index()}_" if jax.process_count() > 1 else ""
        for folder, _, names in os.walk(local):
            target = files.join(self._folder, os.path.relpath(folder, local))
            if names:
                files.make_folder(target)
            for name in names:
                files.copy(os.path.join(folder, name), files.join(target, prefix + name))

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Prints an error as a warning: a profile must not end a run of several days."""
        try:
            yield
        except Exception as error:
            print(
                f"warning: --profile_steps={self._given}: no profile in {self._folder} "
                f"({retries.describe(error)}); training continues",
                file=sys.stderr,
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._local:
            self._end()
