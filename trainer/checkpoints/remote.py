"""Model directories in object stores: Orbax's access to them, and growing files.

Orbax writes arrays with TensorStore and everything else with etils. For gs://, etils uses
TensorFlow's client if installed, otherwise gcsfs. All find the same credentials.
"""

import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor

from tasks.storage import files

# Time between copies. Cloud Storage accepts at most one change to an object per second.
_COPY_SECONDS = 10.0


def prepare(folder: str) -> None:
    """Checks access to a remote folder, with clearer errors than Orbax's (see store.Store)."""
    files.list_names(folder)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        from etils.epath import gpath

        # etils asks Google over gRPC whether a bucket is zonal, which emulators do not answer. The
        # answer "yes" makes it use gcsfs. TensorFlow's client would bypass the emulator and contact
        # Google, unless it goes through a proxy.
        proxied = bool(os.environ.get("HTTPS_PROXY"))
        gpath._is_zonal_gcs_bucket = lambda bucket: not proxied


class Mirror:
    """A temporary local `folder` whose changed files are copied in full to a remote folder."""

    def __init__(self, target: str):
        self._target = target
        self._temporary = tempfile.TemporaryDirectory(prefix="palimpsest-mirror-")
        self.folder = self._temporary.name
        self._copied: dict[str, tuple[int, int]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._copying: Future[None] | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Starts copying in the background, unless a copy runs or began less than 10 s ago."""
        now = time.monotonic()
        if now - self._began > _COPY_SECONDS and (not self._copying or self._copying.done()):
            self._wait()
            self._began = now
            self._copying = self._pool.submit(self._copy)

    def finish(self) -> None:
        """Waits until all files are copied; like `begin`, may raise a UserError."""
        self._wait()
        self._copy()

    def _wait(self) -> None:
        copying, self._copying = self._copying, None
        if copying:
            copying.result()

    def _copy(self) -> None:
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                state = os.stat(path)
                changed = (state.st_size, state.st_mtime_ns)
                if self._copied.get(path) != changed:
                    files.copy(path, files.join(self._target, os.path.relpath(path, self.folder)))
                    self._copied[path] = changed
