"""Remote files as ranges of bytes: read on demand, with retries, and ahead on threads."""

import bisect
import contextlib
import io
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any, cast

from tasks.storage import retries

# Fewest bytes per request: at 100 MB/s, a latency of 50 ms is a third of its time.
REQUEST_BYTES = 8 << 20
# Requests of a reader at a time, each for a span of at most so many bytes; with 20 MB/s and 50 ms
# for a connection, 95 % of its time is transfer.
CONNECTIONS, SPAN_BYTES = 4, 20 << 20
_LEAST_SPAN_BYTES = 4 << 20  # of requests at the end
# Most bytes that were asked for and not read.
_HELD_BYTES = (CONNECTIONS + 1) * SPAN_BYTES
# Bytes between two chunks that cost less than a request of their own.
_GAP_BYTES = 256 << 10

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


def spans(groups: Iterable[Iterable[Span]]) -> Iterator[Span]:
    """Yields parts of groups of chunks in the order of reading, at most SPAN_BYTES each.

    Groups are read one after another, the chunks of a group side by side.
    """
    for chunks in groups:
        for _, start, stop in sorted(part for chunk in chunks for part in _parts(*chunk)):
            yield start, stop


def _parts(start: int, stop: int) -> list[tuple[float, int, int]]:
    """Returns (its place in the chunk, first byte, end) of parts with at most SPAN_BYTES."""
    size, count = stop - start, -(-(stop - start) // SPAN_BYTES)
    cuts = [start + size * number // max(count, 1) for number in range(count + 1)]
    ends = enumerate(itertools.pairwise(cuts))
    return [(number / count, begin, end) for number, (begin, end) in ends]


class _Request:
    """Spans of a file with small gaps at most between them; `left` of their bytes were not read."""

    def __init__(self, file: "Ranges", turn: int, spans: list[Span]):
        self.file, self.turn, self.until, self.spans = file, turn, turn, spans
        self.left = sum(stop - start for start, stop in spans)
        self.data: Future[bytearray] | None = None  # once it is asked for

    @property
    def start(self) -> int:
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        return self.spans[-1][1]

    def takes(self, start: int, stop: int, turn: int) -> bool:
        """Adds a span, if it is not asked for yet and would not become too large."""
        if self.data or not 0 <= start - self.stop <= _GAP_BYTES:
            return False
        if stop - self.start > SPAN_BYTES:
            return False
        self.spans, self.left, self.until = (
            [*self.spans, (start, stop)],
            self.left + stop - start,
            turn,
        )
        return True

    def cut(self, size: int) -> "_Request":
        """Leaves about `size` bytes, and returns a request for the rest."""
        at = self.start + size
        rest = [(max(start, at), stop) for start, stop in self.spans if stop > at]
        self.spans = [(start, min(stop, at)) for start, stop in self.spans if start < at]
        other = _Request(self.file, self.turn, rest)
        self.left, other.until = self.left - other.left, self.until
        return other


class Ahead:
    """Fetches what will be read of several files, in that order, up to a number of bytes.

    Its methods may be called in any thread.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(CONNECTIONS)
        self._waiting: list[_Request] = []  # in the order of their turns
        self._held = self._running = 0
        self._ends = False  # nothing more will be expected
        self._lock = threading.RLock()

    def expect(
        self, file: "Ranges", spans: Iterable[Span], turn: int = 0, last: bool = False
    ) -> None:
        """Fetches spans of a file, which are read once, after all those of lower turns.

        The connections end together after the `last` ones.
        """
        with self._lock:
            file.ahead = self
            for start, stop in spans:
                if not (file.expected and file.expected[-1].takes(start, stop, turn)):
                    self._wait(_Request(file, turn, [(start, stop)]))
            self._ends = self._ends or last
            self._ask_more()

    def asked(self, file: "Ranges", start: int) -> tuple[_Request | None, int]:
        """Returns the request for the bytes from `start` on; if none is, where one begins."""
        with self._lock:
            found = next((each for each in file.expected if each.start <= start < each.stop), None)
            if found and not found.data:
                self._waiting.remove(found)
                self._ask(found)
            begins = (each.start for each in file.expected if each.start > start)
            return found, min(begins, default=file.size())

    def was_read(self, request: _Request, count: int) -> None:
        """Lets go of a request once all of its bytes were read."""
        with self._lock:
            request.left -= count
            if request.left <= 0:
                self._forget([request])

    def forget(self, file: "Ranges", turn: float = math.inf) -> None:
        """Lets go of what is left of the requests of lower turns."""
        with self._lock:
            self._forget([each for each in file.expected if each.until < turn])

    def close(self) -> None:
        """Ends it, once all files are closed."""
        self._threads.shutdown(wait=False)

    def _forget(self, requests: Iterable[_Request]) -> None:
        for each in requests:
            if each in each.file.expected:
                each.file.expected.remove(each)
                if each.data:
                    each.data.cancel()
                    self._held -= each.stop - each.start
                else:
                    self._waiting.remove(each)
        self._ask_more()

    def _ask_more(self) -> None:
        # What waits may still grow, as a few large requests are faster.
        while (
            self._waiting and self._running < CONNECTIONS and self._held <= _HELD_BYTES - SPAN_BYTES
        ):
            first = self._waiting.pop(0)
            if self._ends:
                left = sum(each.left for each in [first, *self._waiting])
                most = max(left // CONNECTIONS, _LEAST_SPAN_BYTES)
                if first.left > most + _LEAST_SPAN_BYTES:
                    self._wait(first.cut(most), 0)
            self._ask(first)

    def _wait(self, request: _Request, place: int | None = None) -> None:
        request.file.expected.append(request)
        if place is None:
            bisect.insort(self._waiting, request, key=lambda each: each.turn)
        else:
            self._waiting.insert(place, request)

    def _ask(self, request: _Request) -> None:
        self._held += request.stop - request.start
        self._running += 1
        request.data = self._threads.submit(request.file.whole, request.start, request.stop)
        request.data.add_done_callback(self._ended)

    def _ended(self, _: object) -> None:
        with self._lock:
            self._running -= 1
            self._ask_more()


class Ranges(io.RawIOBase):
    """A remote file for reading and seeking; reads are short only at the end of the file.

    What an `Ahead` expects is fetched before it is read, several spans at a time.
    """

    _position = 0

    def __init__(self, path: str, size: int, fetch: Fetch):
        self._path, self._size, self._fetch = path, size, fetch
        self.ahead: Ahead | None = None
        self.expected: list[_Request] = []  # and not read; only `ahead` changes it

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

    def whole(self, start: int, stop: int) -> bytearray:
        """Requests the bytes [start, stop)."""
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
        """Reads the bytes from `start` on, to where a request begins or ends; returns a number."""
        request, next_begin = self.ahead.asked(self, start) if self.ahead else (None, self._size)
        if not self.ahead or not request or not request.data:
            return self._fill(view[: next_begin - start], start)
        data, at = memoryview(request.data.result()), start - request.start
        count = min(len(data) - at, len(view))
        view[:count] = data[at : at + count]
        self.ahead.was_read(request, count)
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
                    if self.closed:
                        raise ValueError("closed while it was read")
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
        super().close()
        if self.ahead:
            self.ahead.forget(self)
