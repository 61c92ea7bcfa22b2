"""Work that is done elsewhere and followed by looking at its files."""

import contextlib
import threading
from collections.abc import Callable, Iterator

# Listing a remote folder takes long and costs money.
_LOCAL_SECONDS, _REMOTE_SECONDS = 0.5, 10.0


@contextlib.contextmanager
def polling(look: Callable[[], bool | None], remote: bool) -> Iterator[None]:
    """Calls `look` at intervals, on a thread, while the block runs or until it returns True.

    `remote`: whether `look` lists a remote folder, which makes the interval 10 s instead of 0.5 s.
    """
    over = threading.Event()
    seconds = _REMOTE_SECONDS if remote else _LOCAL_SECONDS

    def loop() -> None:
        while not over.wait(seconds):
            if look():
                return

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
