"""Addresses of hosts."""

import ipaddress
import socket

from tasks.terminal.command_line import UserError


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine alone, as "localhost" and 127.0.0.1 are."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_free(host: str, port: int) -> None:
    """Raises UserError if a server cannot listen there; gRPC would share another server's port."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(place)
            tried.listen()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"cannot serve on {host}:{port}: {reason}; choose another") from error
