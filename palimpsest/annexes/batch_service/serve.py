"""Serves batches of caches over the network, by Arrow Flight, and shows which caches there are.

    palimpsest serve --cache_dir=DIR [--port=8815] [--status_port=8816]

Clients open palimpsest.batches("grpc://HOST:PORT", …). Only this machine is served, unless there
are tokens and a certificate (docs/batch_service.md).
"""

import dataclasses
import os
import signal
import sys
import threading
from typing import IO, TYPE_CHECKING

from palimpsest.annexes.batch_service.addresses import check_free, is_loopback
from tasks.storage import files
from tasks.terminal.command import Command
from tasks.terminal.command_line import EXIT_INTERRUPTED, UserError
from tasks.terminal.flag_fields import REQUIRED, ReadIf, Rule, above, at_least, field

if TYPE_CHECKING:
    from palimpsest.annexes.batch_service.account import Account
    from palimpsest.annexes.batch_service.service import Service
    from palimpsest.annexes.batch_service.tokens import Tokens

_PORT = Rule("from 0 to 65535", lambda value: 0 <= value < 1 << 16)
_REMOTE = ReadIf(lambda flags: files.is_remote(flags.cache_dir), "with a local --cache_dir")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command."""

    cache_dir: str = field(REQUIRED, "folder or URL of the caches to serve")
    task_module: str | None = field(
        None, "Python module that defines more tasks in a tuple TASKS, as for a run"
    )
    host: str = field(
        "127.0.0.1", "address to serve on; others than this machine need TLS and tokens"
    )
    port: int = field(8815, "port of the batches; 0 chooses one", rule=_PORT)
    status_port: int | None = field(
        None, "port of health, metrics and pages over HTTP; 0 chooses one", rule=_PORT
    )
    tokens: str | None = field(
        None, "TOML file of bearer tokens and their tasks (docs/batch_service.md)", metavar="FILE"
    )
    licenses: str | None = field(
        None,
        'TOML file with the caches\' licences for the pages, in lines "CACHE" = "LICENCE"',
        metavar="FILE",
        read_if=ReadIf(lambda flags: flags.status_port is not None, "with --status_port"),
    )
    tls_certificate: str | None = field(None, "PEM file of TLS's certificate", metavar="FILE")
    tls_key: str | None = field(None, "PEM file of the certificate's key", metavar="FILE")
    local_dir: str | None = field(
        None,
        "folder for local copies of a remote cache's shards, reused by the next start; None: a "
        "temporary folder",
        read_if=_REMOTE,
    )
    local_bytes: int = field(
        50 << 30,
        "maximum number of bytes of a remote cache to keep on the local disk",
        rule=at_least(1),
        read_if=_REMOTE,
    )
    threads: int = field(
        1,
        "threads that make batches; several servers are faster than several threads",
        rule=at_least(1),
    )
    kept_bytes: int = field(
        64 << 20,
        "bytes of batches to keep for clients that ask for the same ones",
        rule=at_least(0),
    )
    configuration_bytes: int = field(
        1 << 30, "bytes of orders and plans to keep, of the settings used last", rule=at_least(0)
    )
    client_bytes: int = field(
        1 << 30, "bytes that the streams of one client may hold", rule=at_least(1)
    )
    client_streams: int = field(64, "streams that one client may have", rule=at_least(1))
    client_requests: float = field(
        50.0, "requests that one client may make in a second", rule=above(0)
    )
    access_log: str | None = field(
        None, "file to which a line of JSON is appended for each call; -: stdout", metavar="FILE"
    )
    grace_seconds: float = field(
        10.0,
        "seconds that SIGTERM and Ctrl-C give to streams to end after the batch at hand",
        rule=at_least(0),
    )


def run(flags: Flags) -> int:
    """Serves until SIGTERM or Ctrl-C; returns 0."""
    certificate = _certificate(flags)
    stop = _on_signals()
    from palimpsest.annexes.batch_service.account import Account
    from palimpsest.annexes.batch_service.tokens import Tokens

    tokens = Tokens(flags.tokens) if flags.tokens else None
    for port in (flags.port, flags.status_port):
        check_free(flags.host, port or 0)
    account = Account(_log(flags.access_log))
    service = _service(flags, account, tokens, certificate)
    status = ""
    if flags.status_port is not None:
        from palimpsest.annexes.batch_service.catalogue import Catalogue, read_licenses
        from palimpsest.annexes.batch_service.status import Status

        catalogue = Catalogue(flags.cache_dir, read_licenses(flags.licenses))
        place = flags.host, flags.status_port
        server = Status(place, catalogue, service, account, tokens)
        status = f"; status: {server.begin(flags.tls_certificate, flags.tls_key)}"
    scheme = "grpc+tls" if certificate else "grpc"
    host = f"[{flags.host}]" if ":" in flags.host else flags.host
    print(f"serving {flags.cache_dir}: {scheme}://{host}:{service.port}{status}", flush=True)
    stop.wait()
    try:
        print("stopping: streams end after the batch at hand", flush=True)
    finally:  # also if nobody reads stdout any more
        ended = service.stop(flags.grace_seconds)
    if not ended:
        print(f"{service.gate.open[0]} streams were cut off", flush=True)
        os._exit(0)  # the streams' threads never end
    return 0


def _certificate(flags: Flags) -> tuple[bytes, bytes] | None:
    """Returns TLS's certificate and key; raises UserError if the address needs them, or tokens."""
    if (flags.tls_certificate is None) != (flags.tls_key is None):
        raise UserError("--tls_certificate and --tls_key belong together: give both")
    if not is_loopback(flags.host) and not (flags.tokens and flags.tls_certificate):
        raise UserError(
            f"--host={flags.host} is open to other machines, which needs --tokens, "
            "--tls_certificate and --tls_key (docs/batch_service.md)"
        )
    if flags.tls_certificate is None or flags.tls_key is None:
        return None
    try:
        return files.read_bytes(flags.tls_certificate), files.read_bytes(flags.tls_key)
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: no such file") from error


def _on_signals() -> threading.Event:
    """Returns an event that SIGTERM or Ctrl-C sets; the second signal ends the process at once."""
    stop = threading.Event()

    def end(*_: object) -> None:
        if stop.is_set():
            os._exit(EXIT_INTERRUPTED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    return stop


def _log(path: str | None) -> IO[str] | None:
    return sys.stdout if path == "-" else open(path, "a", encoding="utf-8") if path else None


def _service(
    flags: Flags, account: "Account", tokens: "Tokens | None", pair: tuple[bytes, bytes] | None
) -> "Service":
    from palimpsest.annexes.batch_service.gate import Limits
    from palimpsest.annexes.batch_service.opening import Opener
    from palimpsest.annexes.batch_service.service import Service, Size

    opener = Opener(flags.cache_dir, flags.task_module, flags.local_dir, flags.local_bytes)
    limits = Limits(flags.client_streams, flags.client_bytes, flags.client_requests)
    size = Size(flags.kept_bytes, flags.configuration_bytes, flags.threads)
    return Service((flags.host, flags.port), opener, limits, size, account, tokens, pair)


main = Command(Flags, run, waits=True)

if __name__ == "__main__":
    main.start()
