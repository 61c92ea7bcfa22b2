"""Polls files to follow work that is done elsewhere."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

# Listing a remote folder takes long and costs money.
_LOCAL_SECONDS, _REMOTE_SECONDS = 0.5, 10.0
# Shortest pause between two looks, in durations of a look: listing 80,000 local files takes as long
# as the interval.
_PAUSES = 20


@contextlib.contextmanager
def polling(look: Callable[[], bool | None], remote: bool) -> Iterator[None]:
    """Calls `look` on a thread until the block ends or it returns True; less often if slow."""
    over = threading.Event()
    seconds = _REMOTE_SECONDS if remote else _LOCAL_SECONDS

    def loop() -> None:
        pause = seconds
        while not over.wait(pause):
            started = time.thread_time()
            if look():
                return
            pause = max(seconds, _PAUSES * (time.thread_time() - started))

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
