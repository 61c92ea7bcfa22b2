"""The server of batches, an Arrow Flight service without state: any server answers any ticket."""

import contextlib
import dataclasses
import json
import math
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from palimpsest.annexes.batch_service import shelves
from palimpsest.annexes.batch_service.account import Account
from palimpsest.annexes.batch_service.gate import Busy, Gate, Limits
from palimpsest.annexes.batch_service.opening import Opened, Opener
from palimpsest.annexes.batch_service.tickets import (
    Ticket,
    config_of,
    is_narrow,
    json_object,
    number_of,
    record_of,
)
from palimpsest.annexes.batch_service.tokens import ANYBODY, Holder, Refused, Tokens
from tasks.terminal import command_line
from tasks.terminal.command_line import UserError

_Value = TypeVar("_Value")
# The key of the middleware that knows a call.
_CALL = "call"
# Configurations that are opened at a time, which mostly wait for files.
_OPENERS = 2
# Batches that a stream holds: the one that is made, and the one that is sent.
_HELD = 2
# Characters of an error that a client is told; gRPC sends it in a header.
_LONGEST_LINE = 1500
ACTIONS = {
    "describe": "config -> the whole config, the number of batches, and a digest of their examples",
    "spec": "a ticket -> shape and type of each feature of its first batch",
    "explain": "config, batch and row -> the documents of the row",
    "health": "nothing -> {}",
}


_METHODS = flight.FlightMethod
_ANSWERED = (_METHODS.DO_GET, _METHODS.DO_ACTION, _METHODS.LIST_ACTIONS)


class Forbidden(UserError):
    """A task that a client's token does not name."""


class Stopping(UserError):
    """The server ends; another one answers."""


# How errors are told to clients; the first that fits. Other mistakes are about what was asked.
_STATUSES: Mapping[type[Exception], tuple[str, type[flight.FlightError]]] = {
    Refused: ("unauthenticated", flight.FlightUnauthenticatedError),
    Forbidden: ("forbidden", flight.FlightUnauthorizedError),
    Busy: ("busy", flight.FlightUnavailableError),
    Stopping: ("stopping", flight.FlightUnavailableError),
    UserError: ("refused", flight.FlightServerError),
    Exception: ("failed", flight.FlightInternalError),
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Bytes of kept batches, bytes of opened configurations, and batches made at a time."""

    batches: int
    configurations: int
    threads: int


class _Call(flight.ServerMiddleware):
    """One call: its client, and its facts for the log."""

    def __init__(self, kind: str, holder: Holder, account: Account):
        self.holder, self._kind, self._account = holder, kind, account
        self._begun = time.monotonic()
        self.facts: dict[str, Any] = {"client": holder.name}

    def call_completed(self, exception: Exception | None) -> None:
        self.facts.setdefault("status", "ok" if exception is None else "failed")
        status = self.facts.pop("status")
        self._account.ended(self._kind, status, self._begun, self.facts)


class _Calls(flight.ServerMiddlewareFactory):
    """Lets calls with a valid token in, up to a client's number of requests."""

    def __init__(self, tokens: Tokens | None, gate: Gate, account: Account):
        self._tokens, self._gate, self._account = tokens, gate, account

    def start_call(self, info: flight.CallInfo, headers: Mapping[str, list[str]]) -> _Call:
        kind, begun = info.method.name.lower(), time.monotonic()
        try:
            given = next(iter(headers.get("authorization", ())), "")
            holder = self._tokens.holder(given) if self._tokens else ANYBODY
            self._gate.count(holder.name)
            if info.method not in _ANSWERED:
                raise UserError("this server answers DoGet, DoAction and ListActions only")
        except Exception as error:
            status, told = _told(error)
            self._account.ended(kind, status, begun, {"error": str(told)})
            raise told from None
        return _Call(kind, holder, self._account)


class Service(flight.FlightServerBase):
    """Serves until `stop`; `place` is (host, port), and port 0 chooses one."""

    def __init__(
        self,
        place: tuple[str, int],
        opener: Opener,
        limits: Limits,
        size: Size,
        account: Account,
        tokens: Tokens | None = None,
        certificate: tuple[bytes, bytes] | None = None,  # of TLS, and its key
    ):
        self._opener, self._size, self._account = opener, size, account
        self.gate = Gate(limits)
        self._made = shelves.Shelf[pa.RecordBatch](
            lambda record: record.nbytes, size.batches, at_once=size.threads
        )
        self._opened = shelves.Shelf[Opened](shelves.array_bytes, size.configurations, 64, _OPENERS)
        self._stopping = threading.Event()
        for name, words, value in (
            ("streams", "open streams", lambda: self.gate.open[0]),
            ("stream_bytes", "bytes that open streams hold", lambda: self.gate.open[1]),
            ("batch_bytes", "bytes of batches that are kept", lambda: self._made.bytes),
            ("configurations", "opened configurations", lambda: len(self._opened)),
            ("configuration_bytes", "bytes of their arrays", lambda: self._opened.bytes),
        ):
            account.gauge(name, words, value)
        super().__init__(
            place,
            tls_certificates=[certificate] if certificate else None,
            middleware={_CALL: _Calls(tokens, self.gate, account)},
        )

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def stop(self, seconds: float) -> bool:
        """Ends streams after the batch that they send; returns whether all ended in time."""
        self._stopping.set()
        ending = threading.Thread(target=self.shutdown, daemon=True)
        ending.start()
        ending.join(seconds)
        return not ending.is_alive()

    def do_get(self, context: flight.ServerCallContext, ticket: flight.Ticket) -> Any:
        call = context.get_middleware(_CALL)
        with _telling(call):
            asked = Ticket.parse(ticket.ticket)
            opened = self._open(call.holder, asked.config, asked.record)
            call.facts |= {"tasks": opened.tasks, "first": asked.first, "sent": 0, "bytes": 0}
            opened.check(asked.first)
            spec = opened.spec(asked.first, asked.index, asked.parts)
            size = sum(math.prod(shape) * kind.itemsize for shape, kind in spec.values())
        stream = self._stream(call, asked, opened, _HELD * size)
        return flight.GeneratorStream(next(stream), stream)

    def _stream(self, call: _Call, asked: Ticket, opened: Opened, held: int) -> Iterator[Any]:
        """Yields the schema of a ticket's batches, then each batch's record with its number.

        A stream may end early: where shapes or types change, and where the server stops.
        """
        with _telling(call), self.gate.stream(call.holder.name, held):
            schema = None
            for step in range(asked.first, min(asked.first + asked.count, opened.end)):
                record = self._record(opened, step, asked.index, asked.parts)
                if schema is None:
                    schema = record.schema
                    yield schema
                if record.schema != schema:
                    return
                call.facts["sent"] += 1
                call.facts["bytes"] += record.nbytes
                self._account.add(batches=1, rows=record.num_rows, bytes=record.nbytes)
                yield record, json.dumps({"batch": step}).encode()
                if self.stopping:
                    return
                if call.holder.expired:
                    raise Refused(f"the token of {call.holder.name} has expired")

    def _record(self, opened: Opened, step: int, index: int, parts: int) -> pa.RecordBatch:
        def make() -> pa.RecordBatch:
            begun = time.thread_time()
            batch = opened.batch(step, index, parts)
            # Once too large, values are likely to be so again.
            opened.narrow = opened.narrow and is_narrow(batch)
            record = record_of(batch, opened.narrow)
            self._account.add(making_seconds=time.thread_time() - begun)
            return record

        try:
            return self._made.ask((opened.batches_key, step, index, parts), make)
        except UserError as error:
            self._opened.drop(opened)  # its cache may be another by now
            raise self._opener.hiding(error) from error

    def _open(self, holder: Holder, config: Mapping[str, Any], record: str = "") -> Opened:
        """Returns an opened configuration, whose examples are as the client knows them."""
        if self.stopping:
            raise Stopping("this server is stopping: ask another")
        asked = self._opener.asked(config)
        for task in asked.tasks:
            if not holder.may_read(task):
                raise Forbidden(f"the token of {holder.name} is not for task {task}")
        opened = self._opened.ask(asked.key, lambda: self._opener.open(asked))
        if not record and opened.replaced:
            self._opened.drop(opened)
            opened = self._opened.ask(asked.key, lambda: self._opener.open(asked))
        if record and record != opened.record:
            raise UserError(
                "this server makes other examples than the one that these batches began with: ask "
                "a server of the same version and caches, or begin again"
            )
        return opened

    def do_action(self, context: flight.ServerCallContext, action: flight.Action) -> list[bytes]:
        call = context.get_middleware(_CALL)
        call.facts["action"] = action.type[:40]
        with _telling(call):
            if action.type not in ACTIONS:
                raise UserError(f"no such action: there are {', '.join(ACTIONS)}")
            answer = getattr(self, f"_{action.type}")(call, action.body.to_pybytes())
            return [json.dumps(answer).encode()]

    def _health(self, call: _Call, body: bytes) -> dict[str, Any]:
        if self.stopping:
            raise Stopping("this server is stopping: ask another")
        return {}

    def _describe(self, call: _Call, body: bytes) -> dict[str, Any]:
        opened = self._open(call.holder, config_of(json_object(body, "the body")))
        # Tickets have the whole configuration, which names the same batches.
        key = self._opener.asked(opened.description["config"]).key
        self._opened.ask(key, lambda: opened)
        return opened.description

    def _explain(self, call: _Call, body: bytes) -> Any:
        value = json_object(body, "the body")
        return self.explained(call.holder, value)

    def explained(self, holder: Holder, value: Mapping[str, Any]) -> list[Any]:
        """Returns the documents of a row, as the action `explain`; raises UserError likewise."""
        opened = self._open(holder, config_of(value))
        return opened.explain(number_of(value, "batch"), number_of(value, "row"))

    def _spec(self, call: _Call, body: bytes) -> dict[str, Any]:
        """Returns feature -> [shape, type] of rows of a batch."""
        asked = Ticket.parse(body)
        opened = self._open(call.holder, asked.config, asked.record)
        opened.check(asked.first)
        spec = opened.spec(asked.first, asked.index, asked.parts)
        return {name: [list(shape), str(kind)] for name, (shape, kind) in spec.items()}

    def list_actions(self, context: flight.ServerCallContext) -> list[tuple[str, str]]:
        return list(ACTIONS.items())


@contextlib.contextmanager
def _telling(call: _Call) -> Iterator[None]:
    """Raises the block's error as its client is told, in one line, and notes it for the log."""
    try:
        with command_line.storage_named():
            yield
    except flight.FlightError:
        raise
    except Exception as error:
        call.facts["status"], told = _told(error)
        call.facts["error"] = str(told)
        raise told from None


def _told(error: Exception) -> tuple[str, flight.FlightError]:
    """Returns (status, the error for the client); what is no user's mistake goes to stderr."""
    status, kind = next(each for known, each in _STATUSES.items() if isinstance(error, known))
    line = " ".join(str(error).split())[:_LONGEST_LINE]
    if status == "failed":
        traceback.print_exception(error, file=sys.stderr)
        line = "the server failed: its stderr says why"
    return status, kind(line, line.encode())
