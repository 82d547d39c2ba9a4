"""Addresses as browsers and HTTP clients write them: whether a text is one. Functions are pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]{0,31}://(\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:[1-9][0-9]{0,4})?"
)
_DEFAULT_PORTS = {"http": 80, "https": 443}


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_web_address(text: str) -> bool:
    """Return whether a text is an address of HTTP or HTTPS, with a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is not a number, a malformed IPv6 address
        return False


def is_origin(text: str) -> bool:
    """Return whether a text is an origin as a browser sends it: a scheme, a host in lower case, and
    a port if it is not the scheme's own; no path, not even a slash."""
    if not _ORIGIN.fullmatch(text):
        return False
    try:
        url = urlsplit(text)
        return url.port is None or url.port != _DEFAULT_PORTS.get(url.scheme)
    except ValueError:  # a port above 65,535, a malformed IPv6 address
        return False
