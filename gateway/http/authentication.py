"""Checks the Host header and origins, extracts the API key or a proxy's user, counts wrong keys.

It knows no handler and no store. `gateway.http.middleware` calls it before a body is read.
"""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from aiohttp import web

from gateway.errors import Kind, Refusal
from tenancy.errors import KeyRefused

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")

WRONG_KEYS_PER_MINUTE_MAX = 300
"""Wrong keys from one address within a minute before they get 429."""

_ADDRESSES_MAX = 4_096
"""Addresses counted at once; the one unseen for longest is dropped first."""

_NONE: list[str] = []

KEY_HEADERS = ("X-Api-Key", "X-Goog-Api-Key")
"""Headers that hold a key, beside Authorization."""
ACT_HEADER = "X-Trunkline-Request"
"""A header without which a change by a proxy's user is refused; its value is not read."""
USER_CHARS_MAX = 200
"""Longest name of a proxy's user, in characters."""


ANY_ORIGIN = "*"
CORS_METHODS = "GET, HEAD, POST, PATCH, DELETE"
"""The methods of the public listener."""
CORS_HEADERS = "Authorization, Content-Type"
PREFLIGHT_MAX_AGE_S = 600
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(\s*,\s*[A-Za-z0-9_-]{1,64}){0,63}")

ALL_ADDRESSES = (str(ipaddress.IPv4Address(0)), f"[{ipaddress.IPv6Address(0)}]")
"""Names among the allowed hosts that allow every address, and no other name."""


def check_host(
    request: web.BaseRequest, allowed: tuple[str, ...], setting: str = "server.hosts"
) -> None:
    """Require exactly one Host header with a plain, allowed name. `setting`: lists the names.

    Raises Refusal.

    A foreign or malformed Host would change the URL, and so the path, that is parsed from it.
    """
    given = request.headers.getall("Host", _NONE)
    name = _host_name(given[0]) if len(given) == 1 else None
    if name is None or request.rel_url.raw_path[:1] != "/":
        raise Refusal(
            Kind.BAD, "bad_host", "Invalid Host; expected one Host header with a plain name."
        )
    if "*" not in allowed and name not in allowed and not _is_allowed_address(name, allowed):
        raise Refusal(
            Kind.BAD,
            "host_not_allowed",
            f"Host not allowed: {name!r}; expected a name listed in {setting}.",
        )


def _is_allowed_address(name: str, allowed: tuple[str, ...]) -> bool:
    if not any(one in allowed for one in ALL_ADDRESSES):
        return False
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


@lru_cache(maxsize=64)
def _host_name(host: str) -> str | None:
    """Return the name without the port. Cached: nearly all requests have the same Host."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].lower()


def bearer_key(request: web.BaseRequest, *, takes_query: bool = True) -> str:
    """Return the API key of a request.

    SDKs send it as `Authorization: Bearer`, `X-Api-Key` (Anthropic), `X-Goog-Api-Key` or `?key=`
    (Gemini). `takes_query`: false for administrators' keys, which proxies must not write down.
    Raises KeyRefused if there is none, Refusal if two differ or the query has one that may not.
    """
    found = []
    headers = request.headers
    authorized = headers.getall("Authorization", _NONE)
    for value in authorized:
        scheme, _, key = value.partition(" ")
        found.append(key.strip() if scheme.lower() == "bearer" else "")
    for header in KEY_HEADERS:
        if header in headers:
            found += [value.strip() for value in headers.getall(header)]
    if request.rel_url.raw_query_string and "key" in request.query:
        if not takes_query:
            raise Refusal(
                Kind.BAD,
                "key_in_query",
                "An administrator's key is not accepted in the address, which proxies and histories"
                " keep. Rotate the key, and send the new one as Authorization: Bearer <key>.",
                param="key",
            )
        found += request.query.getall("key", [])
    if len(authorized) > 1 or len(set(found)) > 1:
        raise Refusal(Kind.BAD, "ambiguous_key", "Two different keys; expected one.")
    if not found or not found[0]:
        raise KeyRefused("key_unknown", "Missing API key; expected Authorization: Bearer <key>.")
    return found[0]


def has_key(request: web.BaseRequest) -> bool:
    """Return whether a header of the request has a key, valid or not."""
    headers = request.headers
    return any(name in headers for name in KEY_HEADERS) or any(
        value.partition(" ")[0].lower() == "bearer"
        for value in headers.getall("Authorization", _NONE)
    )


class TrustedHeader:
    """Administrators that a proxy has authenticated and names in a header.

    Only connections from the proxy's own addresses are believed; a key in the request comes first.
    A browser sends a proxy's cookie with every request, one that a foreign page makes too: a
    request that changes something must therefore have `X-Trunkline-Request`, which no page of
    another origin can set.
    """

    def __init__(self, name: str, proxies: Iterable[str], scopes: Iterable[str]) -> None:
        """`name`: of the header; "" believes none. `proxies`: networks, such as 10.0.0.7/32."""
        self._name = name
        self._proxies = tuple(map(ipaddress.ip_network, proxies))
        self.scopes = frozenset(scopes)

    def user_of(self, request: web.BaseRequest) -> str | None:
        """Return the user that a trusted proxy names, or None. Raises Refusal."""
        if not self._name or self._name not in request.headers:
            return None
        if has_key(request) or not self._is_proxy(request.remote):
            return None
        given = request.headers.getall(self._name)
        user = given[0].strip()
        if len(given) > 1 or not user.isprintable() or not 0 < len(user) <= USER_CHARS_MAX:
            raise Refusal(
                Kind.AUTH,
                "bad_trusted_header",
                f"Invalid {self._name}; expected it once, with a user of 1 to {USER_CHARS_MAX}"
                " printable characters.",
            )
        if request.method not in ("GET", "HEAD") and ACT_HEADER not in request.headers:
            raise Refusal(
                Kind.PERMISSION,
                "cross_site_request",
                f"A change by a user of a proxy needs the header {ACT_HEADER}, which pages of other"
                " sites cannot send.",
            )
        return user

    def _is_proxy(self, remote: str | None) -> bool:
        try:
            address = ipaddress.ip_address(remote or "")
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._proxies)


NO_TRUSTED_HEADER = TrustedHeader("", (), ())
"""Believes no header: administrators sign in with keys."""


class WrongKeys:
    """Counts wrong keys by address and minute, for at most 4,096 addresses."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def record(self, address: str) -> bool:
        """Count one more wrong key of an address; return whether it exceeds the limit. O(1)."""
        minute = int(self._clock() // 60)
        since, count = self._seen.pop(address, (minute, 0))
        count = count + 1 if since == minute else 1
        self._seen[address] = (minute, count)
        if len(self._seen) > _ADDRESSES_MAX:
            self._seen.popitem(last=False)
        return count > WRONG_KEYS_PER_MINUTE_MAX


class CrossOrigin:
    """The origins whose pages may call the listener; `ANY_ORIGIN` among them admits all.

    Keys travel in headers and never in cookies, so no answer allows credentials: a page can only
    use a key that it was given.
    """

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Return the headers that every answer to the request needs, errors too: without them a
        page cannot even read why it was refused. O(1); empty if no origin is allowed."""
        if not self._origins:
            return {}
        allowed = ANY_ORIGIN
        if ANY_ORIGIN not in self._origins:
            allowed = request.headers.get("Origin", "")
            if allowed not in self._origins:
                return {"Vary": "Origin"}
        found = {"Access-Control-Allow-Origin": allowed, "Access-Control-Expose-Headers": "*"}
        if allowed != ANY_ORIGIN:
            found["Vary"] = "Origin"
        if self.is_preflight(request):
            asked = request.headers.get("Access-Control-Request-Headers", "")
            names = asked if _HEADER_NAMES.fullmatch(asked) else CORS_HEADERS
            found["Access-Control-Allow-Methods"] = CORS_METHODS
            found["Access-Control-Allow-Headers"] = names
            found["Access-Control-Max-Age"] = str(PREFLIGHT_MAX_AGE_S)
        return found

    def is_preflight(self, request: web.BaseRequest) -> bool:
        """Return whether a browser asks if a page may send a request; the answer names no path's
        methods, so that the request itself tells what is wrong with it."""
        return (
            bool(self._origins)
            and request.method == "OPTIONS"
            and "Origin" in request.headers
            and "Access-Control-Request-Method" in request.headers
        )
