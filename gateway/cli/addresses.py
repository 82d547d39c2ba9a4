"""Addresses of listeners: tried before a server starts, and asked while it runs."""

from __future__ import annotations

import errno
import http.client
import json
import socket
from typing import Any

from gateway.cli.database import ADMIN_KEY_FILE
from gateway.cli.result import CommandError
from gateway.config import Config, parse_address

TIMEOUT_S = 5.0
"""Longest wait for the server's answer."""


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


def ask_admin(config: Config, path: str, method: str = "GET") -> Any:
    """Return the admin listener's answer, asked with the administrator's key of the data directory.

    Raises CommandError.
    """
    listen, file = config.admin.listen, config.data / ADMIN_KEY_FILE
    host, port = parse_address(listen, "admin.listen")
    if not host.strip("0.:"):  # a listener on all addresses
        host = "127.0.0.1"
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise CommandError(
            f"{file} cannot be read: {error.strerror}; expected an administrator's key in it"
        ) from error
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(
            f"no server answers at {listen} (admin.listen): is it running?"
        ) from error
    finally:
        connection.close()
    if answer.status != 200:
        raise CommandError(f"the server at {listen} refuses: {body['error']['message']}")
    return body


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
