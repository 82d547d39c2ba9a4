"""Who may come in: the name they asked for, the key they brought, and how often it was wrong.

It knows no handler and no store; the middleware calls it before a body is read.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache

from aiohttp import web

from gateway.errors import Kind, Refusal
from tenancy.errors import KeyRefused

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
WRONG_KEYS_PER_MINUTE_MAX = 300
_ADDRESSES_REMEMBERED = 4_096
_NONE: list[str] = []


def check_host(request: web.BaseRequest, allowed: tuple[str, ...]) -> None:
    """`Host` must be there once, be a plain name, and be ours. Raises Refusal.

    Whoever reads a URL built from a foreign `Host` is told a path that was never asked for.
    """
    given = request.headers.getall("Host", _NONE)
    name = _name_in(given[0]) if len(given) == 1 else None
    if name is None or request.rel_url.raw_path[:1] != "/":
        raise Refusal(Kind.BAD, "bad_host", "The request needs one plain Host header.")
    if "*" not in allowed and name not in allowed:
        raise Refusal(
            Kind.BAD,
            "host_not_allowed",
            "This server does not answer to that name; server.hosts lists those it answers to.",
        )


@lru_cache(maxsize=64)
def _name_in(host: str) -> str | None:
    """The name without its port: nearly all requests bring the same."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].lower()


def bearer_key(request: web.BaseRequest) -> str:
    """The key, from wherever the SDKs put it: `Authorization: Bearer`, `X-Api-Key` (Anthropic),
    `X-Goog-Api-Key` or `?key=` (Gemini). Raises KeyRefused; Refusal if two differ."""
    found = []
    headers = request.headers
    authorized = headers.getall("Authorization", _NONE)
    for value in authorized:
        scheme, _, key = value.partition(" ")
        found.append(key.strip() if scheme.lower() == "bearer" else "")
    for header in ("X-Api-Key", "X-Goog-Api-Key"):
        if header in headers:
            found += [value.strip() for value in headers.getall(header)]
    if request.rel_url.raw_query_string:
        found += request.query.getall("key", [])
    if len(authorized) > 1 or len(set(found)) > 1:
        raise Refusal(Kind.BAD, "ambiguous_key", "Two different keys were sent; send one.")
    if not found or not found[0]:
        raise KeyRefused("key_unknown", "No key was sent: use Authorization: Bearer <key>.")
    return found[0]


class WrongKeys:
    """Counts wrong keys by address and minute, for as many addresses as it can afford."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def is_too_many(self, address: str) -> bool:
        """Count one more from here: is it above the limit? O(1)."""
        minute = int(self._clock() // 60)
        since, count = self._seen.pop(address, (minute, 0))
        count = count + 1 if since == minute else 1
        self._seen[address] = (minute, count)
        if len(self._seen) > _ADDRESSES_REMEMBERED:
            self._seen.popitem(last=False)
        return count > WRONG_KEYS_PER_MINUTE_MAX
