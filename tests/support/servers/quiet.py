"""A threaded HTTP server on loopback that prints nothing, the base of stand-ins for services."""

import http.server
import json
import sys
import threading
from typing import Any, ClassVar, Self


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """A handler of HTTP 1.1 requests, whose attribute `owner` is the server it belongs to."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: Any = b"", **headers: str) -> None:
        """Sends bytes, or a value as JSON; `_` in names of headers stands for `-`."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if not isinstance(body, bytes):
            headers.setdefault("Content_Type", "application/json")
        self.send_response(status)
        for name, value in {"Content_Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.send_data(data)

    def send_data(self, data: bytes) -> None:
        self.wfile.write(data)


class _Threads(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # as when the client disconnects
            super().handle_error(request, client_address)


class QuietServer:
    """A server that runs inside a `with` block; `url` is its address."""

    handler: ClassVar[type[QuietHandler]]
    port = 0  # a free one

    def __enter__(self) -> Self:
        handler = type("OurHandler", (self.handler,), {"owner": self})
        self._server = _Threads(("127.0.0.1", self.port), handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"http://{self.address}"
        # A short poll, as the end of a block waits for it.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
