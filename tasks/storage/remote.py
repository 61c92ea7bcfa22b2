"""What goes over the network is tried again for minutes; files are read by ranges, and never others
than were planned.

Whatever may pass is tried again with exponential backoff and jitter, from the byte that was
reached: connections reset or timed out, answers 408, 425, 429 and 5xx, answers cut short. A server
that says when to come back (Retry-After) is obeyed. What will not pass is an error at once.

    PALIMPSEST_RETRY_SECONDS   give up after so long without a byte of progress (600)
    PALIMPSEST_RETRY_DELAY     seconds before the first retry, then doubled up to a minute (1)
"""

import contextlib
import io
import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from tasks.terminal.command_line import UserError

Result = TypeVar("Result")
# Yields the bytes [start, stop) of a file in chunks of any size.
Fetch = Callable[[int, int], Generator[bytes, None, None]]

_LONGEST_DELAY_SECONDS = 60.0
# Statuses worth another try, beside those from 500 up.
RETRIED = (408, 425, 429)
# Errors of the HTTP libraries under fsspec and huggingface_hub, by name: which of the libraries is
# installed depends on the store.
_PASSING = {
    "ConnectionError", "TimeoutError", "gaierror", "CutShort",
    "TransportError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead",
    "ChunkedEncodingError", "ProtocolError", "HTTPClientError", "ChecksumError",
}  # fmt: skip
_LASTING = {"UserError", "OfflineModeIsEnabled", "UnsupportedProtocol", "LocalProtocolError"}


class Refused(OSError):
    """An answer of HTTP that is an error."""

    def __init__(self, status: int, headers: Mapping[str, str]):
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers


class CutShort(OSError):
    """Fewer bytes than were asked for and are there."""


def patiently(
    what: str,
    action: Callable[[], Result],
    progress: Callable[[], object] = lambda: None,
    seconds: Callable[[], float] = lambda: math.inf,
) -> Result:
    """Returns `action()`, called again while it fails for a reason that may pass.

    Args:
      what: the file or the service, for the message.
      action: is called again whole; it remembers what it has done.
      progress: says how far it has come; a change begins the waiting anew.
      seconds: how long without progress before giving up, if less than the module says.

    Raises:
      UserError: no progress for so long; names `what` and the last reason.
      Exception: whatever else `action` raises.
    """
    most = float(os.environ.get("PALIMPSEST_RETRY_SECONDS", 600))
    first = float(os.environ.get("PALIMPSEST_RETRY_DELAY", 1))
    before, delay, began = progress(), first, time.monotonic()
    while True:
        try:
            return action()
        except Exception as error:
            passing = _passing(error)
            if passing is None:
                raise
            reason, asked = passing
            if progress() != before:
                before, delay, began = progress(), first, time.monotonic()
            # Half of it by chance, so that workers who failed together do not return together.
            limit = min(most, seconds())
            pause = max(asked, delay * random.uniform(0.5, 1))
            if time.monotonic() + pause - began > limit:
                raise UserError(
                    f"{what} cannot be reached: nothing came for {limit:.0f} s, the last reason "
                    f"was {reason}; what is finished is kept, give the same command again to go on"
                ) from error
        logging.getLogger(__name__).warning("%s: %s, again in %.1f s", what, reason, pause)
        time.sleep(pause)
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)


def _passing(error: Exception) -> tuple[str, float] | None:
    """(why, seconds to wait at least) of an error that may pass by itself, else None."""
    chain: list[BaseException] = [error]
    # Not what was being handled as it happened, which is another request's failure.
    while following := chain[-1].__cause__:
        chain.append(following)
    kinds = {kind.__name__ for link in chain for kind in type(link).__mro__}
    outermost = {kind.__name__ for kind in type(error).__mro__}
    if outermost & _LASTING or "SSLCertVerificationError" in kinds:
        return None
    for link in chain:
        status, headers = answer(link)
        if status:
            again = status in RETRIED or status >= 500
            return (f"HTTP {status}", _asked_to_wait(headers)) if again else None
    return (said(error), 0.0) if kinds & _PASSING else None


def said(error: BaseException) -> str:
    """What an error says, for a message: without what gives access to the files."""
    text = re.sub(r"(\w+://[^\s?]+)\?[^\s'\"]+", r"\1", " ".join(str(error).split()))
    text = re.sub(r"\bhf_\w+|Bearer \S+", "...", text)[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def answer(error: BaseException) -> tuple[int, Mapping[str, str]]:
    """Status and headers of an answer of HTTP that a library's error carries, else 0."""
    if any(kind.__name__ == "BadHttpMessage" for kind in type(error).__mro__):
        return 0, {}  # aiohttp's, of a body that was cut short: its 400 is nobody's answer
    holder: Any = getattr(error, "response", None) or error
    for name in ("status_code", "status", "code"):
        status = getattr(holder, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status, getattr(holder, "headers", None) or {}
    if isinstance(holder, dict):  # botocore
        answer = holder.get("ResponseMetadata", {})
        return answer.get("HTTPStatusCode", 0), answer.get("HTTPHeaders", {})
    return 0, {}


def _asked_to_wait(headers: Mapping[str, str]) -> float:
    """Seconds of Retry-After, given as a number or a date, or of the Hub's own RateLimit."""
    import email.utils

    given = headers.get("Retry-After") or headers.get("retry-after") or ""
    with contextlib.suppress(ValueError):
        return max(0.0, float(given))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    found = re.search(r"\br=0;\s*t=(\d+)", headers.get("RateLimit") or headers.get("ratelimit", ""))
    return float(found[1]) if found else 0.0


def check(path: str, planned: tuple[int, str], found: tuple[int, str]) -> None:
    """Holds (size, etag) that a store reports against those of the plan; an empty etag is unknown.

    Raises:
      UserError: the file is another one now.
    """
    sizes, tags = zip(planned, found, strict=True)
    if sizes[0] != sizes[1]:
        difference = f"it had {sizes[0]:,} bytes and has {sizes[1]:,}"
    elif all(tags) and tags[0] != tags[1]:
        difference = f"its etag was {tags[0]} and is {tags[1]}"
    else:
        return
    raise UserError(
        f"{path} has changed since the corpus was listed ({difference}): give the file back, or "
        "begin anew in another folder"
    )


class File(io.RawIOBase):
    """A file elsewhere for reading and seeking; a read gives all that it asks for or the end."""

    def __init__(self, path: str, size: int, fetch: Fetch):
        self._path, self._size, self._fetch = path, size, fetch
        self._position = 0

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
        """Bytes; pyarrow asks."""
        return self._size

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        start = self._position
        stop = max(start, min(self._size, start + len(view)))

        def rest() -> None:
            if self._position == stop:
                return
            with contextlib.closing(self._fetch(self._position, stop)) as chunks:
                for chunk in chunks:
                    end = self._position + len(chunk)
                    if end > stop:
                        raise OSError(f"more bytes than the {stop - start} asked for")
                    view[self._position - start : end - start] = chunk
                    self._position = end
            if self._position < stop:
                raise CutShort(f"{stop - self._position:,} bytes are missing")

        patiently(self._path, rest, lambda: self._position)
        return stop - start
