"""A threaded HTTP server on loopback that prints nothing, the base of stand-ins for services."""

import http.server
import threading
from typing import Self


class QuietHandler(http.server.BaseHTTPRequestHandler):
    """A handler of HTTP 1.1 requests, whose attribute `hub` is the server it belongs to."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass


class _Threads(http.server.ThreadingHTTPServer):
    def handle_error(self, *_):
        pass  # the client disconnected


class QuietServer:
    """A server that runs inside a `with` block; `url` is its address."""

    @property
    def handler(self) -> type[QuietHandler]:
        """The class of its requests' handlers."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        handler = type("Handler", (self.handler,), {"hub": self})
        self._server = _Threads(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
