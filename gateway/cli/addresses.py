"""Addresses of listeners, tried before a server starts."""

from __future__ import annotations

import socket

from gateway.cli.result import CommandError
from gateway.config import parse_address


def check_address(address: str, what: str) -> None:
    """Check that an address can be listened on now. Raises CommandError with the reason."""
    host, port = parse_address(address, what)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in places[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CommandError(f"{what}: cannot listen on {address}: {reason}") from error
