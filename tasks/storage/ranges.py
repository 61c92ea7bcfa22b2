"""Remote files as ranges of bytes: read on demand, with retries, and ahead on threads."""

import contextlib
import io
import itertools
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, cast

from tasks.storage import retries

# Fewest bytes per request: at 100 MB/s, a latency of 50 ms is a third of its time.
REQUEST_BYTES = 8 << 20
# Requests for one file at a time, each for a span of at most so many bytes; with 20 MB/s and 50 ms
# for a connection, 94 % of its time is transfer.
CONNECTIONS, SPAN_BYTES = 4, 12 << 20
_LEAST_SPAN_BYTES = 1 << 20

# Yields the bytes [start, stop) of a file in chunks of any size.
Fetch = Callable[[int, int], Generator[bytes, None, None]]
Span = tuple[int, int]  # the bytes [start, stop)


def open_ranges(path: str, size: int, fetch: Fetch, ahead: int = REQUEST_BYTES) -> IO[bytes]:
    """Opens a file whose ranges `fetch` yields; retries resume at the last byte received.

    `path` is for messages. A request has at least `ahead` bytes; 0 requests exactly the bytes read,
    and returns a `Ranges`.
    """
    raw = Ranges(path, size, fetch)
    return io.BufferedReader(raw, ahead) if ahead else cast(IO[bytes], raw)


def spans(groups: Iterable[Iterable[Span]]) -> list[Span]:
    """Divides groups of chunks among the connections, in the order of reading.

    Groups are read one after another, the chunks of a group side by side.
    """
    groups = [[*chunks] for chunks in groups]
    total = sum(stop - start for chunks in groups for start, stop in chunks)
    most = SPAN_BYTES
    if total < 2 * SPAN_BYTES:
        most = max(total // CONNECTIONS, _LEAST_SPAN_BYTES)
    found: list[Span] = []
    for chunks in groups:
        parts = [part for chunk in chunks for part in _parts(*chunk, most)]
        for _, start, stop in sorted(parts):
            if found and found[-1][1] == start and stop - found[-1][0] <= most:
                found[-1] = found[-1][0], stop
            else:
                found.append((start, stop))
    return found


def _parts(start: int, stop: int, most: int) -> list[tuple[float, int, int]]:
    """Returns (its place in the chunk, first byte, end) of parts with at most `most` bytes."""
    size, count = stop - start, -(-(stop - start) // most)
    cuts = [start + size * number // max(count, 1) for number in range(count + 1)]
    ends = enumerate(itertools.pairwise(cuts))
    return [(number / count, begin, end) for number, (begin, end) in ends]


class Ranges(io.RawIOBase):
    """A remote file for reading and seeking; reads are short only at the end of the file.

    Spans that are expected are fetched before they are read, several at a time.
    """

    _position = 0

    def __init__(self, path: str, size: int, fetch: Fetch):
        self._path, self._size, self._fetch = path, size, fetch
        self._threads: ThreadPoolExecutor | None = None
        self._expected: list[Span] = []  # not yet asked for, the next one last
        self._asked: dict[Span, Future[bytearray]] = {}
        self._left: dict[Span, int] = {}  # bytes of those asked for that were not read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def size(self) -> int:
        """Returns the file's size in bytes; pyarrow calls this."""
        return self._size

    def expect(self, spans: Iterable[Span]) -> None:
        """Fetches spans in this order. Their bytes are held until all of them were read once."""
        self._expected = [*self._expected[::-1], *spans][::-1]
        self._threads = self._threads or ThreadPoolExecutor(CONNECTIONS)
        self._ask_more()

    def _ask_more(self) -> None:
        while self._expected and len(self._asked) <= CONNECTIONS:  # and one waits to be read
            self._ask(self._expected.pop())

    def _ask(self, span: Span) -> None:
        assert self._threads
        self._left[span] = span[1] - span[0]
        self._asked[span] = self._threads.submit(self._whole, *span)

    def _whole(self, start: int, stop: int) -> bytearray:
        data = bytearray(stop - start)
        self._fill(memoryview(data), start)
        return data

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self._position
        view = view[: max(0, min(self._size - start, len(view)))]
        done = 0
        while done < len(view):
            done += self._some(view[done:], start + done)
        self._position = start + done
        return done

    def _some(self, view: memoryview, start: int) -> int:
        """Reads the bytes from `start` on, up to where a span begins or ends; returns a number."""
        known = [*self._asked, *self._expected]
        span = next((each for each in known if each[0] <= start < each[1]), None)
        if span is None:
            next_begin = min((begin for begin, _ in known if begin > start), default=self._size)
            return self._fill(view[: next_begin - start], start)
        if span not in self._asked:
            self._expected.remove(span)
            self._ask(span)
        begin, end = span
        count = min(end - start, len(view))
        view[:count] = memoryview(self._asked[span].result())[start - begin : start - begin + count]
        self._left[span] -= count
        if self._left[span] <= 0:
            del self._asked[span], self._left[span]
            self._ask_more()
        return count

    def _fill(self, view: memoryview, start: int) -> int:
        """Requests the bytes from `start` on; returns their number."""
        position, stop = start, start + len(view)

        def rest() -> None:
            nonlocal position
            if position == stop:
                return
            with contextlib.closing(self._fetch(position, stop)) as chunks:
                for chunk in chunks:
                    end = position + len(chunk)
                    if end > stop:
                        raise OSError(f"more bytes than the {stop - start} requested")
                    view[position - start : end - start] = chunk
                    position = end
            if position < stop:
                raise retries.Truncated(f"{stop - position:,} bytes are missing")

        retries.with_retries(self._path, rest, lambda: position)
        return stop - start

    def close(self) -> None:
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._asked.clear()
        super().close()
