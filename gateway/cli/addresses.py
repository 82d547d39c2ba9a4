"""Addresses of listeners, tried before a server starts."""

from __future__ import annotations

import errno
import socket

from gateway.cli.result import CommandError
from gateway.config import parse_address


class AddressError(CommandError):
    """An address that cannot be listened on: what was found, and the remedy."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(f"{found}; {fix}")
        self.found = found
        self.fix = fix


def check_address(address: str, setting: str) -> None:
    """Check that an address can be listened on now. `setting`: the one that it is of. Raises
    AddressError."""
    host, port = parse_address(address, setting)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in places[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        fix = _FIXES.get(error.errno or 0, f"set {setting} to an address of this machine")
        found = f"{setting}: cannot listen on {address}: {reason}"
        raise AddressError(found, fix.format(setting=setting)) from error


_FIXES = {
    errno.EADDRINUSE: (
        "stop the running server or other program that has it (ss -ltnp shows it), or set {setting}"
        " to a free address"
    ),
    errno.EACCES: (
        "set {setting} to a port of 1024 or above, or let this program have lower ones"
        " (CAP_NET_BIND_SERVICE)"
    ),
}
"""What to do about an error of the system."""
