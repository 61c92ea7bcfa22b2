"""The client of servers of batches: any of them answers any ticket, so it goes on at another."""

import contextlib
import copy
import dataclasses
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from palimpsest.annexes.batch_service.addresses import is_loopback
from palimpsest.annexes.batch_service.tickets import MOST, Ticket, batch_of
from tasks.terminal.command_line import UserError
from trainer.data.features import Batch
from trainer.data.origins import Document
from trainer.data.run_batches import Spec

_Value = TypeVar("_Value")
TOKEN = "PALIMPSEST_TOKEN"
_ADDRESS = re.compile(r"(grpc(?:\+tcp|\+tls)?)://(\[[^\]]+\]|[^:/,]+):(\d+)/?")
# A stream is asked for this long; one that is read more slowly is asked for again, where it was.
_STREAM_SECONDS = 120.0
# Batches that a stream may have, and that an access out of order asks for.
_MANY, _ONE = 1 << 20, 1
# How long the first call and later ones wait for a server that answers.
_FIRST_SECONDS, _PATIENCE_SECONDS = 5.0, 600.0
_LONGEST_PAUSE = 5.0
# gRPC would wait up to two minutes before it looks for a server again, for all clients together.
_GRPC = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]


def addresses_of(text: str) -> list[str]:
    """Returns the servers in "grpc://HOST:PORT,HOST:PORT"; raises UserError for another text."""
    scheme, found = "", []
    for part in text.split(","):
        part = part.strip()
        scheme = part.partition("://")[0] if "://" in part else scheme
        full = part if "://" in part else f"{scheme}://{part}"
        if not _ADDRESS.fullmatch(full):
            raise UserError(f"{text}: write grpc://HOST:PORT or grpc+tls://HOST:PORT")
        found.append(full.rstrip("/"))
    return found


class Servers:
    """Servers with the same caches, asked in turn; a thread or process may use it at a time.

    Every call carries the token in PALIMPSEST_TOKEN, if there is one.
    """

    def __init__(self, addresses: Sequence[str]):
        self._addresses, self._turn = list(addresses), 0
        self._client: flight.FlightClient | None = None
        self._process, self._met = 0, False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def __str__(self) -> str:
        return ",".join(self._addresses)

    @property
    def _address(self) -> str:
        return self._addresses[self._turn % len(self._addresses)]

    def options(self) -> flight.FlightCallOptions:
        """Returns the options of a call; raises UserError if its token could be overheard."""
        token = os.environ.get(TOKEN, "")
        if token and not self._address.startswith("grpc+tls:"):
            host = _ADDRESS.fullmatch(self._address)
            if host and not is_loopback(host[2]):
                raise UserError(
                    f"{self._address} would show the token in {TOKEN} to the network: use grpc+tls://"
                )
        headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        return flight.FlightCallOptions(timeout=_STREAM_SECONDS, headers=headers)

    def connected(self) -> flight.FlightClient:
        """Returns the client of the server at hand, one per process."""
        if self._client is None or self._process != os.getpid():
            self._client, self._process = (
                flight.connect(self._address, generic_options=_GRPC),
                os.getpid(),
            )
        return self._client

    def answered(self, ask: Callable[[], _Value]) -> _Value:
        """Returns what `ask` returns of the first server that answers.

        Raises UserError if a server refuses, or none answers: for 5 seconds in the first call, then
        for 10 minutes, since servers are restarted.
        """
        begun, pause = time.monotonic(), 0.05
        patience = _PATIENCE_SECONDS if self._met else _FIRST_SECONDS
        while True:
            for _ in self._addresses:
                try:
                    value = ask()
                except (pa.ArrowException, OSError) as error:
                    why = _transient(error)
                    self._change()
                else:
                    self._met = True
                    return value
            if time.monotonic() - begun > patience:
                raise UserError(f"no batches from {self}: {why}")
            if pause >= 1:
                logging.getLogger(__name__).warning("waiting for batches from %s: %s", self, why)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _change(self) -> None:
        if self._client is not None and self._process == os.getpid():
            with contextlib.suppress(pa.ArrowException):
                self._client.close()
        self._client, self._turn = None, self._turn + 1

    def act(self, action: str, **values: Any) -> Any:
        """Returns the answer to an action, a value of JSON."""
        body = json.dumps(values).encode()

        def ask() -> Any:
            found = self.connected().do_action(flight.Action(action, body), self.options())
            return json.loads(next(iter(found)).body.to_pybytes())

        return self.answered(ask)


def _transient(error: Exception) -> str:
    """Returns why a call may be repeated; raises UserError if a server has refused it."""
    told = getattr(error, "extra_info", b"").decode(errors="replace")
    if told and not isinstance(error, flight.FlightUnavailableError):
        raise UserError(told) from None
    if isinstance(error, pa.ArrowNotImplementedError):
        raise UserError("there is no server of batches at this address") from None
    line = " ".join(str(error).split()).removeprefix("Flight returned ")
    return told or re.sub(r"\.? ?(gRPC client debug context|Client context|Detail): .*", "", line)


class Remote:
    """The law of batches that servers make from their caches (`trainer.data.run_batches.Law`).

    `config` may lack what follows from the caches, which the server adds. Raises UserError if no
    server answers, or one refuses it.
    """

    def __init__(self, address: str, config: Mapping[str, Any]):
        self._servers = Servers(addresses_of(address))
        found = self._servers.act("describe", config=config)
        self.config: dict[str, Any] = found["config"]
        self.length: int | None = found["length"]
        self._record = found["record"]

    def batches(self, host: int = 0, hosts: int = 1) -> "Stream":
        """Returns the rows of one host; raises UserError unless `hosts` divides the batch."""
        ticket = Ticket(self.config, 0, 1, host, hosts, self._record)
        stream = Stream(copy.copy(self._servers), ticket, self.length or MOST)
        stream.spec(0)
        return stream

    def explain(self, k: int, row: int) -> list[Document]:
        """Returns the documents of a row of batch `k`, counted over all hosts."""
        found = self._servers.act("explain", config=self.config, batch=k, row=row)
        return [Document(*each) for each in found]


class Stream:
    """Rows of batches from servers: a part of each batch, in the order in which they are asked for.

    Consecutive batches come in one stream. Any thread may ask; a process that gets the object opens
    streams of its own.
    """

    def __init__(self, servers: Servers, ticket: Ticket, end: int):
        """`ticket` has the part of the batches, whose number is `end`."""
        self._servers, self._ticket, self._end = servers, ticket, end
        self._forget()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_lock", "_reader", "_next", "_process")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()
        self._lock = threading.Lock()

    def _forget(self) -> None:
        self._reader: flight.FlightStreamReader | None = None
        self._next, self._process = -1, os.getpid()

    def __getitem__(self, step: int) -> Batch:
        """Returns this part's rows of batch `step`; raises UserError as `Servers.answered` does."""
        with self._lock:
            if self._process != os.getpid():
                self._forget()
            return self._servers.answered(lambda: self._read(step))

    def iterate(self, first_step: int, threads: int = 1, prefetch: int = 4) -> Iterator[Batch]:
        """Yields the batches from `first_step` on, by a stream of its own, read ahead."""
        own = Stream(copy.copy(self._servers), self._ticket, self._end)
        return _ahead(own.__getitem__, range(first_step, self._end), prefetch)

    def rows(self, step: int) -> int:
        """Returns the number of this part's rows of a batch."""
        return next(iter(self.spec(step).values()))[0][0]

    def spec(self, step: int) -> Spec:
        """Returns the shapes and types of a batch's features."""
        ticket = dataclasses.replace(self._ticket, first=step)
        found = self._servers.act("spec", **ticket.values())
        return {name: (tuple(shape), np.dtype(kind)) for name, (shape, kind) in found.items()}

    def _read(self, step: int) -> Batch:
        try:
            chunk = self._chunk(step)
        except BaseException:
            self._reader = None
            raise
        self._next = step + 1
        return batch_of(chunk.data)

    def _chunk(self, step: int) -> flight.FlightStreamChunk:
        follows = step == self._next
        for _ in range(2):  # a stream may end early
            if self._reader is None or not follows:
                self._open(step, _MANY if follows else _ONE)
                follows = True
            assert self._reader is not None
            with contextlib.suppress(StopIteration):
                chunk = self._reader.read_chunk()
                number = json.loads(chunk.app_metadata.to_pybytes())["batch"]
                if number != step:
                    raise UserError(f"asked for batch {step}, got {number}: the server is broken")
                return chunk
            self._reader = None
        raise flight.FlightUnavailableError("the stream ended without a batch")

    def _open(self, step: int, count: int) -> None:
        if self._reader is not None:
            self._reader.cancel()
        ticket = dataclasses.replace(self._ticket, first=step, count=count)
        self._reader = self._servers.connected().do_get(
            flight.Ticket(ticket.content()), self._servers.options()
        )


def _ahead(read: Callable[[int], Batch], numbers: Iterable[int], most: int) -> Iterator[Batch]:
    """Yields `read` of each number, up to `most` read before.

    The reader is a daemon thread: a process ends also while no server answers.
    """
    over = threading.Event()
    wanted: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each batch
    ready: queue.SimpleQueue[tuple[Batch | None, BaseException | None]] = queue.SimpleQueue()

    def fill() -> None:
        try:
            for number in numbers:
                wanted.get()
                if over.is_set():
                    return
                ready.put((read(number), None))
            ready.put((None, None))
        except BaseException as error:
            ready.put((None, error))

    threading.Thread(target=fill, name="batches", daemon=True).start()
    for _ in range(max(most, 1)):
        wanted.put(None)
    try:
        while True:
            wanted.put(None)
            found, error = ready.get()
            if error:
                raise error
            if found is None:
                return
            yield found
    finally:
        over.set()
        wanted.put(None)
