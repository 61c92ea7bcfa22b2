"""Model directories in object stores: how Orbax comes to them, and files that grow.

Orbax writes arrays by TensorStore and all else by etils, which takes TensorFlow's client for gs://
where TensorFlow is installed and gcsfs where it is not. All find the same credentials.
"""

import os
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor

from tasks.storage import files

# Cloud Storage takes one change of an object a second; a reader sees this much later.
_COPY_SECONDS = 10.0


def prepare(folder: str) -> None:
    """Looks whether the store of a remote `folder` lets us in, before Orbax does; it says it worse.

    Raises:
      UserError: see files.on_store.
    """
    files.list_names(folder)
    if os.environ.get("STORAGE_EMULATOR_HOST"):
        from etils.epath import gpath

        # etils asks Google by gRPC whether a bucket is zonal, which no emulator answers for it;
        # "yes" has it take gcsfs, since TensorFlow's client would go to Google past the emulator,
        # but through a proxy.
        proxied = bool(os.environ.get("HTTPS_PROXY"))
        gpath._is_zonal_gcs_bucket = lambda bucket: not proxied


class Mirror:
    """A folder of this machine whose files are copied, whole, into a remote one as they change.

    `folder` is the path here; it goes with the object.
    """

    def __init__(self, target: str):
        self._target = target
        self._temporary = tempfile.TemporaryDirectory(prefix="palimpsest-mirror-")
        self.folder = self._temporary.name
        self._copied: dict[str, tuple[int, int]] = {}
        self._pool = ThreadPoolExecutor(1)
        self._copying: Future[None] | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Begins to copy in the background, if it is not being done or was just done.

        Raises:
          UserError: the last copying ended with it; see files.on_store.
        """
        now = time.monotonic()
        if now - self._began > _COPY_SECONDS and (not self._copying or self._copying.done()):
            self._wait()
            self._began = now
            self._copying = self._pool.submit(self._copy)

    def finish(self) -> None:
        """Returns when all is there.

        Raises:
          UserError: see files.on_store.
        """
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
                    below = os.path.relpath(path, self.folder)
                    files.copy(path, files.join(self._target, below))
                    self._copied[path] = changed
