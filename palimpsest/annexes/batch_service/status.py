"""Health, metrics and pages about what is served, over HTTP; nothing is accepted."""

import http.server
import json
import ssl
import threading
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from palimpsest.annexes.batch_service.account import Account
from palimpsest.annexes.batch_service.catalogue import Catalogue, documents_page
from palimpsest.annexes.batch_service.service import Service
from palimpsest.annexes.batch_service.tokens import ANYBODY, Holder, Refused, Tokens
from tasks.terminal.command_line import UserError

# A connection that says nothing for so long is closed; and so many are answered at a time.
_IDLE_SECONDS, _AT_ONCE = 10.0, 16
HTML, TEXT, JSON = "text/html; charset=utf-8", "text/plain; charset=utf-8", "application/json"


class Status(http.server.ThreadingHTTPServer):
    """Answers GET /health, /metrics, /, /caches/TASK and /explain; `place` is (host, port)."""

    daemon_threads = True

    def __init__(
        self,
        place: tuple[str, int],
        catalogue: Catalogue,
        service: Service,
        account: Account,
        tokens: Tokens | None,
    ):
        self.service, self.account, self.tokens = service, account, tokens
        self.catalogue = catalogue
        self._room = threading.BoundedSemaphore(_AT_ONCE)
        super().__init__(place, _Handler)

    def begin(self, certificate: str | None, key: str | None) -> str:
        """Answers from now on, with TLS if there are its two files; returns the URL."""
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            # The handshake is for the connection's thread, since a client may never finish it.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=self.serve_forever, name="status", daemon=True).start()
        host, port = self.server_address[:2]
        return f"{'https' if certificate else 'http'}://{host!s}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        # More connections wait in the socket's queue, so that threads stay few.
        self._room.acquire()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing about connections that break."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Status
    timeout = _IDLE_SECONDS
    server_version, sys_version = "palimpsest", ""

    def do_GET(self) -> None:
        try:
            self._answer(*self._found(urlsplit(self.path)))
        except Refused as error:
            self._answer(401, TEXT, f"{error}\n")
        except UserError as error:
            self._answer(404, TEXT, f"{error}\n")

    def _found(self, url: Any) -> tuple[int, str, str]:
        """Returns (status, type, content) of an address; raises UserError if there is none."""
        if url.path == "/health":
            stopping = self.server.service.stopping
            return (503, TEXT, "stopping\n") if stopping else (200, TEXT, "ok\n")
        holder = self._holder()
        if url.path == "/metrics":
            return 200, TEXT, self.server.account.metrics()
        catalogue = self.server.catalogue
        names = [name for name in catalogue.names() if holder.may_read(name)]
        if url.path in ("/", "/caches.json"):
            if url.path == "/":
                return 200, HTML, catalogue.list_page(names)
            return 200, JSON, catalogue.json(names)
        if url.path == "/explain":
            return 200, HTML, self._explained(holder, dict(parse_qsl(url.query)))
        _, folder, name, *rest = [*unquote(url.path).split("/"), "", ""]
        if folder != "caches" or name not in names:
            raise UserError("no such page")
        if rest[:1] == ["windows"]:
            seed = parse_qs(url.query).get("seed", ["0"])[0]
            return 200, HTML, catalogue.windows_page(name, int(seed[:9]) if seed.isdecimal() else 0)
        return 200, HTML, catalogue.page(name)

    def _explained(self, holder: Holder, query: dict[str, str]) -> str:
        """Returns the page of a row's documents; raises UserError if they are refused.

        Besides `batch` and `row`, the query has fields of a configuration, groups as JSON.
        """
        self.server.service.gate.count(holder.name)
        config = {name: _value(text) for name, text in query.items()}
        place = {name: config.pop(name, 0) for name in ("batch", "row")}
        found = self.server.service.explained(holder, {"config": config, **place})
        return documents_page(place, config, found)

    def _holder(self) -> Holder:
        if self.server.tokens is None:
            return ANYBODY
        return self.server.tokens.holder(self.headers.get("Authorization", ""))

    def _answer(self, status: int, kind: str, content: str) -> None:
        data = content.encode(errors="replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Pages are not in the access log."""


def _value(text: str) -> Any:
    """Returns a value in JSON, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
