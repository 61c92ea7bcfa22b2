"""Retries network requests.

Transient errors (connections reset or timed out, HTTP 408, 425, 429 and 5xx, truncated responses)
are retried with exponential backoff and jitter, from the last byte received. A server's Retry-After
is respected. Permanent errors are raised at once.

    PALIMPSEST_RETRY_SECONDS   give up after this many seconds without a byte of progress (600)
    PALIMPSEST_RETRY_DELAY     seconds before the first retry, then doubled up to a minute (1)
"""

import contextlib
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from tasks.terminal.command_line import UserError

Result = TypeVar("Result")

_LONGEST_DELAY_SECONDS = 60.0
# Transient errors of HTTP libraries, by name: the store decides which libraries are installed.
_TRANSIENT = {
    "ConnectionError", "TimeoutError", "gaierror", "Truncated",
    "TransportError", "ClientConnectionError", "ClientPayloadError", "IncompleteRead",
    "ChunkedEncodingError", "ProtocolError", "HTTPClientError", "ChecksumError",
}  # fmt: skip
_thread = threading.local()
_PERMANENT = {"UserError", "OfflineModeIsEnabled", "UnsupportedProtocol", "LocalProtocolError"}


class Unreachable(UserError):
    """A store that cannot be reached, or refuses a request; `why` lacks the advice."""

    def __init__(self, why: str, advice: str = ""):
        super().__init__(f"{why}; {advice}" if advice else why)
        self.why = why


class HttpError(OSError):
    """An HTTP response with an error status."""

    def __init__(self, status: int, headers: Mapping[str, str]):
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers


class Truncated(OSError):
    """A response with fewer bytes than requested, although they exist."""


@contextlib.contextmanager
def stopped_by(event: threading.Event) -> Iterator[None]:
    """Ends this thread's retries in the block once `event` is set: the last error is raised."""
    _thread.stopped = event
    try:
        yield
    finally:
        del _thread.stopped


def with_retries(
    what: str,
    action: Callable[[], Result],
    progress: Callable[[], object] = lambda: None,
    seconds: Callable[[], float] = lambda: math.inf,
) -> Result:
    """Returns the result of `action()`, which is called again after every transient error.

    `what` names the file or service in messages. `action` tracks its own progress. A change of
    `progress()` resets the time limit and the delay. `seconds()` is the time limit without
    progress, if lower than PALIMPSEST_RETRY_SECONDS. Raises UserError once the limit has passed,
    with the last error, and any permanent error of `action`.
    """
    most = float(os.environ.get("PALIMPSEST_RETRY_SECONDS", 600))
    first = float(os.environ.get("PALIMPSEST_RETRY_DELAY", 1))
    before, delay, began = progress(), first, time.monotonic()
    while True:
        try:
            return action()
        except Exception as error:
            transient = _transient(error)
            if transient is None:
                raise
            reason, least = transient
            if progress() != before:
                before, delay, began = progress(), first, time.monotonic()
            # Half of the delay is random, so workers that failed together do not retry together.
            stopped = getattr(_thread, "stopped", None)
            if stopped and stopped.is_set():
                raise
            limit = min(most, seconds())
            pause = max(least, delay * random.uniform(0.5, 1))
            if time.monotonic() + pause - began > limit:
                raise Unreachable(
                    f"{what} cannot be reached: no data for {limit:.0f} s; the last error was "
                    f"{reason}",
                    "finished work is kept: run the same command again to resume",
                ) from error
        logging.getLogger(__name__).warning("%s: %s, retrying in %.1f s", what, reason, pause)
        (stopped.wait if stopped else time.sleep)(pause)
        delay = min(2 * delay, _LONGEST_DELAY_SECONDS)


def causes(error: BaseException, contexts: bool = False) -> list[BaseException]:
    """Returns an error and the chain of its causes.

    With `contexts`, includes errors that were being handled when another was raised, perhaps by
    an unrelated request.
    """
    chain = [error]
    while following := chain[-1].__cause__ or (contexts and chain[-1].__context__):
        chain.append(following)
    return chain


def class_names(errors: Iterable[BaseException]) -> set[str]:
    """Returns the names of the errors' classes and all their base classes."""
    return {kind.__name__ for error in errors for kind in type(error).__mro__}


def is_retried(status: int) -> bool:
    """Returns True for a transient HTTP status."""
    return status in (408, 425, 429) or status >= 500


def _transient(error: Exception) -> tuple[str, float] | None:
    """Returns (reason, least seconds to wait) for a transient error, else None."""
    chain = causes(error)
    names = class_names(chain)
    if class_names([error]) & _PERMANENT or "SSLCertVerificationError" in names:
        return None
    for link in chain:
        status, headers = http_status(link)
        if status:
            return (f"HTTP {status}", _retry_after(headers)) if is_retried(status) else None
    return (describe(error), 0.0) if names & _TRANSIENT else None


def describe(error: BaseException) -> str:
    """Returns an error's class and text for a message, without tokens or signed URLs."""
    text = re.sub(r"(\w+://[^\s?]+)\?[^\s'\"]+", r"\1", " ".join(str(error).split()))
    text = re.sub(r"\bhf_\w+|Bearer \S+", "...", text)[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def http_status(error: BaseException) -> tuple[int, Mapping[str, str]]:
    """Returns the HTTP status and headers of a library's error; status 0 if it has none."""
    if any(kind.__name__ == "BadHttpMessage" for kind in type(error).__mro__):
        return 0, {}  # aiohttp's error for a truncated body; its status 400 is not the server's
    holder: Any = getattr(error, "response", None) or error
    for name in ("status_code", "status", "code"):
        status = getattr(holder, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status, getattr(holder, "headers", None) or {}
    if isinstance(holder, dict):  # botocore
        metadata = holder.get("ResponseMetadata", {})
        return metadata.get("HTTPStatusCode", 0), metadata.get("HTTPHeaders", {})
    return 0, {}


def _retry_after(headers: Mapping[str, str]) -> float:
    """Returns the seconds in Retry-After (a number or a date) or in the Hub's RateLimit, else 0."""
    import email.utils

    given = headers.get("Retry-After") or headers.get("retry-after") or ""
    with contextlib.suppress(ValueError):
        return max(0.0, float(given))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
    found = re.search(r"\br=0;\s*t=(\d+)", headers.get("RateLimit") or headers.get("ratelimit", ""))
    return float(found[1]) if found else 0.0
