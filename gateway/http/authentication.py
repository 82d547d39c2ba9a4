"""Checks the Host header, extracts the API key or a proxy's user, counts wrong keys.

It knows no handler and no store. `gateway.http.middleware` runs it before a body is read.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Generic, TypeVar

from aiohttp import web

from engine.api import Clock
from gateway.config import AdminConfig, ServerConfig, parse_address
from gateway.dialects.families import KEY_HEADERS, find_family
from gateway.errors import Kind, Refusal
from gateway.http.request_context import KeyOwner, RequestState
from gateway.http.route_table import tidy
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import ADMIN, is_key
from tenancy.errors import KeyRefused
from tenancy.types import Identity

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")

WRONG_KEYS_PER_MINUTE_MAX = 300
"""Wrong keys from one address within a minute before they get 429."""

LOOKUPS_PER_MINUTE_MAX = 30
"""Unknown keys from one address within a minute for which the database is read again."""
LOOKUPS_PER_SECOND_MAX = 10
"""The same, of all addresses within a second."""
LOOKUP_S_MAX = 1.0
"""Longest time for which the answer to an unknown key waits for the database."""

_ADDRESSES_MAX = 4_096
"""Addresses counted at once; the one unseen for longest is dropped first."""

_NONE: list[str] = []

T = TypeVar("T")

KEYS_MAX = 4
"""Most different keys of one request: one for each place that SDKs use."""
ACT_HEADER = "X-Trunkline-Request"
"""A header without which a change by a proxy's user is refused; its value is not read."""
USER_CHARS_MAX = 200
"""Longest name of a proxy's user, in characters."""


ALL_ADDRESSES = (str(ipaddress.IPv4Address(0)), f"[{ipaddress.IPv6Address(0)}]")
"""Names among the allowed hosts that allow every address, and no other name."""


def allowed_hosts(listener: ServerConfig | AdminConfig) -> tuple[str, ...]:
    """Return a listener's `hosts` with the address that it has.

    A listener on all addresses may be asked by any address, but not by any name: a page of another
    site can make a name of its own lead here, and no address.
    """
    host = parse_address(listener.listen, "listen")[0].lower()
    return (*listener.hosts, f"[{host}]" if ":" in host else host)


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


def request_keys(request: web.BaseRequest, *, takes_query: bool = True) -> list[str]:
    """Return the different API keys of a request, the one of `Authorization` first.

    SDKs send a key as `Authorization: Bearer`, in a header of `KEY_HEADERS` or as `?key=`. An empty
    value is no key, and neither is another scheme, such as a proxy's Basic.
    `takes_query`: false for administrators' keys, which proxies must not write down.
    Raises Refusal if the query has one that may not, or if there are too many.
    """
    found = _header_keys(request)
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
    keys = [key for key in dict.fromkeys(found) if key]
    if len(keys) > KEYS_MAX or len(request.headers.getall("Authorization", _NONE)) > 1:
        raise Refusal(
            Kind.BAD,
            "ambiguous_key",
            f"Several Authorization headers or {len(keys)} different keys; expected one.",
        )
    return keys


def has_key(request: web.BaseRequest) -> bool:
    """Return whether a header of the request has a key, valid or not."""
    return any(_header_keys(request))


def _header_keys(request: web.BaseRequest) -> list[str]:
    """Return the keys in the headers, which may be empty or equal."""
    found, headers = [], request.headers
    for value in headers.getall("Authorization", _NONE):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer":
            found.append(key.strip())
    for header in KEY_HEADERS:
        if header in headers:
            found += [value.strip() for value in headers.getall(header)]
    return found


class CheckedKeys(Generic[T]):
    """The keys of one request after all were checked: the `valid` identities, and the others.

    A request may have keys of other services: an agent behind a gateway sends a key that it
    remembers beside the one that it was given, and frameworks send placeholders. `unknown`: keys
    that are or were none of this server; `error`: why a request without a valid key is refused.
    """

    def __init__(self, keys: Iterable[str], authenticate: Callable[[str], T]) -> None:
        """Check every key, valid or not, so that the time tells nothing of their order."""
        self.valid: list[T] = []
        self.unknown: list[str] = []
        self.error = KeyRefused("key_unknown", "Missing API key.")
        errors = []
        for key in keys:
            try:
                self.valid.append(authenticate(key))
            except KeyRefused as error:
                errors.append(error.with_traceback(None))  # which would hold the request
                if error.code == "key_unknown":
                    self.unknown.append(key)
        if errors:
            self.error = min(errors, key=lambda error: error.code == "key_unknown")

    @property
    def is_guess(self) -> bool:
        """Whether no key of the request is or was one of this server."""
        return not self.valid and self.error.code == "key_unknown"

    def one(self, same: Callable[[T], object], suits: Callable[[T], bool] = bool) -> T:
        """Return the first valid identity that suits, or else the first. Raises the error if none
        is valid, and Refusal if two valid ones are not the same."""
        if not self.valid:
            raise self.error
        if len({same(identity) for identity in self.valid}) > 1:
            message = "Two different keys, and both are valid; expected one."
            raise Refusal(Kind.BAD, "ambiguous_key", message)
        return next(filter(suits, self.valid), self.valid[0])


def key_problem(error: KeyRefused, header: str, *, is_admin: bool = False) -> str:
    """Return why a key is refused; for one that is missing or unknown also what would be right.
    `header`: where the client's kind sends its key, "" for `Authorization`."""
    if error.code != "key_unknown":
        return error.message
    printed = f"`trunkline key create{' --admin' if is_admin else ''}`"
    where = header or "Authorization: Bearer"
    problem = error.message.rstrip(".")
    return f"{problem}; expected a key of this server, which {printed} prints, in {where}."


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


class _CountsByAddress:
    """Counts of the running minute by address, for at most 4,096 addresses."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def add(self, address: str, minute: int) -> int:
        """Count one more of an address; return how many it has in the minute. O(1)."""
        since, count = self._seen.pop(address, (minute, 0))
        count = count + 1 if since == minute else 1
        self._seen[address] = (minute, count)
        if len(self._seen) > _ADDRESSES_MAX:
            self._seen.popitem(last=False)
        return count


class KeyLookups:
    """Bounds how often unknown keys make the server read the database's newest keys.

    A key works from the moment in which it is made, by another process too, and a flood of unknown
    keys must not cost a query each. Beyond the bounds a new key waits for the next regular read.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_address = _CountsByAddress()
        self._second, self._count = -1, 0

    def admit(self, address: str) -> bool:
        """Count one lookup; return whether the bounds of its address and of all allow it. O(1)."""
        now_s = self._clock()
        if self._by_address.add(address, int(now_s // 60)) > LOOKUPS_PER_MINUTE_MAX:
            return False  # before it takes one of the others'
        if self._second != int(now_s):
            self._second, self._count = int(now_s), 0
        self._count += 1
        return self._count <= LOOKUPS_PER_SECOND_MAX


class WrongKeys:
    """Counts wrong keys by address and minute, for at most 4,096 addresses."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_address = _CountsByAddress()
        self._beside: OrderedDict[int, int] = OrderedDict()
        """Minutes of the latest wrong keys beside known ones, by hashes of address and key."""

    def record(self, address: str) -> bool:
        """Count one more wrong key of an address; return whether it exceeds the limit. O(1)."""
        return self._by_address.add(address, self._minute()) > WRONG_KEYS_PER_MINUTE_MAX

    def record_beside(self, address: str, key: str) -> bool:
        """Do as `record` for a wrong key beside a known one, but count it once in a minute: a
        client that sends another service's key with each request guesses none. O(1)."""
        minute, pair = self._minute(), hash((address, key))
        is_repeated = self._beside.pop(pair, None) == minute
        self._beside[pair] = minute
        if len(self._beside) > _ADDRESSES_MAX:
            self._beside.popitem(last=False)
        return not is_repeated and self.record(address)

    def _minute(self) -> int:
        return int(self._clock() // 60)


class Keys:
    """The keys of tenants and administrators. `trusted` signs in administrators that a proxy has
    authenticated."""

    def __init__(
        self, authenticator: KeyAuthenticator, clock: Clock, trusted: TrustedHeader
    ) -> None:
        self._authenticator = authenticator
        self._trusted = trusted
        self._wrong_keys, self._lookups = WrongKeys(clock), KeyLookups(clock)

    async def enter(self, request: web.BaseRequest, state: RequestState) -> None:
        """Record the key's identity in `state`. Raises Refusal.

        The body has not been read yet: a request without a valid key gets no parser time.
        """
        assert state.declared is not None
        role, registry = state.declared.role, self._authenticator
        if role == "open":
            return
        try:
            if role.startswith(ADMIN):
                await self._authenticate_administrator(request, state)
                scope = role.removeprefix(ADMIN).removeprefix(":")
                if scope and scope not in state.admin_scopes:
                    raise KeyRefused("scope_missing", _lacks_scope(state, scope))
                return
            checked = await self._check(request, request_keys(request), registry.authenticate)
            identity = checked.one(_cache_owner, lambda found: role in found.scopes)
            state.identity = identity
            tenant = identity.tenant
            state.owner = KeyOwner(identity.key_id, tenant.tenant_id, tenant.name)
            if role not in identity.scopes:
                raise KeyRefused("scope_missing", f"This key does not have the {role!r} scope.")
        except KeyRefused as error:
            if error.code == "scope_missing":
                raise Refusal(Kind.PERMISSION, error.code, error.message) from error
            state.owner = self._former_owner(error)
            if error.code == "tenant_suspended":
                raise Refusal(Kind.PERMISSION, error.code, "This tenant is suspended.") from error
            family = find_family(tidy(request.path) + "/", request.headers)
            header = "" if role.startswith(ADMIN) else next(iter(family.key_headers), "")
            message = key_problem(error, header, is_admin=role.startswith(ADMIN))
            raise Refusal(Kind.AUTH, "invalid_api_key", message) from error

    async def _check(
        self, request: web.BaseRequest, keys: list[str], authenticate: Callable[[str], T]
    ) -> CheckedKeys[T]:
        """Check the keys of a request; where none is valid and one is unknown, once more with the
        keys that the database has now. Raises Refusal for too many wrong ones."""
        checked = CheckedKeys(keys, authenticate)
        is_looked_up = not checked.valid and any(map(is_key, checked.unknown))
        if is_looked_up and self._lookups.admit(request.remote or "local"):
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOKUP_S_MAX):
                    await asyncio.wrap_future(self._authenticator.read_now())
            checked = CheckedKeys(keys, authenticate)
        self._count_guesses(request, checked)
        return checked

    def _count_guesses(self, request: web.BaseRequest, checked: CheckedKeys[T]) -> None:
        """Count unknown keys. Raises Refusal beyond the limit of the request's address.

        A revoked or suspended key is no guess: a single one always gets its own error, never a 429.
        """
        address = request.remote or "local"
        if checked.is_guess:
            exceeded = [self._wrong_keys.record(address) for _ in checked.unknown or ("",)]
        else:
            exceeded = [self._wrong_keys.record_beside(address, key) for key in checked.unknown]
        if any(exceeded):
            raise Refusal(
                Kind.RATE,
                "too_many_wrong_keys",
                "Wrong-key limit reached for this address: limit"
                f" {WRONG_KEYS_PER_MINUTE_MAX} per minute.",
                retry_after_s=60.0,
            )

    def _former_owner(self, error: KeyRefused) -> KeyOwner | None:
        """Return whose the refused key was, or None for a key that never was a tenant's."""
        found = self._authenticator.tenant(error.tenant_id) if error.tenant_id else None
        if found is None:
            return None
        return KeyOwner(error.key_id, error.tenant_id, found.tenant.name)

    async def _authenticate_administrator(
        self, request: web.BaseRequest, state: RequestState
    ) -> None:
        """Record the administrator of a key, or the one that a trusted proxy names."""
        user = self._trusted.user_of(request)
        if user is not None:
            state.admin_user, state.admin_scopes = user, self._trusted.scopes
            return
        keys = request_keys(request, takes_query=False)
        checked = await self._check(request, keys, self._authenticator.authenticate_admin)
        administrator = checked.one(lambda found: found.key_id)
        state.admin_key_id, state.admin_scopes = administrator.key_id, administrator.scopes


def _cache_owner(identity: Identity) -> object:
    """Return what two keys of one request must have in common: bill and cache."""
    return identity.tenant.tenant_id, identity.workspace


def _lacks_scope(state: RequestState, scope: str) -> str:
    """Return why an administrator without a scope is refused, and what has it."""
    held = ", ".join(sorted(state.admin_scopes)) or "none"
    if state.admin_user:
        return (
            f"This administrator does not have the {scope!r} scope, but {held}; expected a key with"
            " it, or the scope in admin.trusted_scopes."
        )
    return (
        f"This administrator's key does not have the {scope!r} scope, but {held}; expected a key of"
        f" `trunkline key create --admin --scopes {scope}`, or of all scopes."
    )
