"""Values read ahead by threads, in order."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_Value = TypeVar("_Value")


def prefetched(
    read: Callable[[int], _Value], numbers: Iterable[int], threads: int, ahead: int
) -> Iterator[_Value]:
    """Yields `read(number)` for each of `numbers`, in order, with up to `ahead` read before."""
    pool = ThreadPoolExecutor(threads, "batches")
    coming: collections.deque[Future[_Value]] = collections.deque()
    try:
        for number in numbers:
            coming.append(pool.submit(read, number))
            if len(coming) > ahead:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    finally:
        for each in coming:  # cancel_futures=True would fail if Python shuts down
            each.cancel()
        pool.shutdown(wait=False)
