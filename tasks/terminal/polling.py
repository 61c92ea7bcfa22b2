"""Work that is done elsewhere and followed by looking at its files."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

# Listing a remote folder takes long and costs money.
_LOCAL_SECONDS, _REMOTE_SECONDS = 0.5, 10.0
# Between two looks, at least this many times what one takes: listing 80,000 local files takes as
# long as the interval.
_PAUSES = 20


@contextlib.contextmanager
def polling(look: Callable[[], bool | None], remote: bool) -> Iterator[None]:
    """Calls `look` at intervals, on a thread, while the block runs or until it returns True.

    `remote`: whether `look` lists a remote folder, which makes the interval 10 s instead of 0.5 s,
      or longer if a look takes long.
    """
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
