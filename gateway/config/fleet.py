"""Settings of a fleet: where a model's replicas are, this gateway's name there, and what it shares.

Pure: text in, addresses out. `tables` has the settings, `gateway.engines` uses them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.config.web_addresses import format_address

VARIABLE_OF_SHARED = "VALKEY_PASSWORD"
"""The environment variable with the password of `fleet.shared`."""
VARIABLES = {"TRUNKLINE_FLEET_NAME": "fleet.name", "TRUNKLINE_FLEET_TLS": "fleet.tls"}
"""Environment variables of gateways that share a file, and the key paths that they set."""
RoutingPolicy = Literal["time", "round_robin"]
PromptsApart = Literal["auto", "off"]
NAME_RULE = "up to 63 letters, digits, dots and hyphens, a letter or digit first"
"""What a name of an engine or a gateway may be."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,62}")


class ReplicaSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the replicas of a model are; without any of these its engine runs on this machine."""

    replicas: tuple[str, ...] = ()
    """NAME=HOST:PORT of each engine."""
    replicas_file: str = ""
    """A file with such a line for each; it is followed as it changes."""
    replicas_dns: str = ""
    """HOST:PORT whose addresses are the engines; certificates name them."""
    routing: RoutingPolicy = "time"
    """`time`: the engine that is predicted to be done first; `round_robin`: each in its turn."""

    @property
    def is_elsewhere(self) -> bool:
        """Whether its engines are started by others."""
        return bool(self.replicas or self.replicas_file or self.replicas_dns)


class FleetConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """This gateway among those of a fleet. Name and certificate: only where a model has replicas
    elsewhere."""

    name: str = "g0"
    """In its certificate, as gateway/NAME."""
    tls: str = ""
    """Folder of its certificate; default: fleet/gateway-NAME in the data directory."""
    shared: str = ""
    """rediss://USER@HOST:PORT/NUMBER, or unix:///PATH, of the Valkey in which the gateways of a
    database share their limits, without a password. Without it each has them for itself."""
    prompts_apart: PromptsApart = "off"
    """`auto`: a long prompt is computed by another engine than its answer, where that is predicted
    to cost less in all; `off`: never, and engines' roles say nothing."""


class ReplicaAddress(Struct, frozen=True):
    """A replica's name, and where it listens. No name: its certificate says it."""

    name: str
    host: str
    port: int

    def __str__(self) -> str:
        address = format_address(self.host, self.port)
        return f"{self.name}={address}" if self.name else address


def is_fleet_name(name: str) -> bool:
    """Return whether an engine or a gateway may have this name."""
    return _NAME.fullmatch(name) is not None


def parse_replica(line: str) -> ReplicaAddress:
    """Return a replica of NAME=HOST:PORT. Raises ValueError, which says what is expected."""
    name, equals, place = line.strip().partition("=")
    host, _, port = place.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65_535
    is_place = bool(host.strip("[]")) and is_port
    if is_place and name and not is_fleet_name(name):
        raise ValueError(f"{line.strip()[:120]!r}: the name {name[:80]!r}; expected {NAME_RULE}")
    if not equals or not name or not is_place:
        raise ValueError(
            f"{line.strip()[:120]!r}: expected NAME=HOST:PORT, such as e0=10.0.0.1:7443"
        )
    return ReplicaAddress(name, host.strip("[]"), int(port))


def parse_replicas(lines: list[str] | tuple[str, ...]) -> tuple[ReplicaAddress, ...]:
    """Return the replicas of such lines; empty ones and those that begin with # count for nothing.
    Raises ValueError for a wrong line, and for a name or an address twice."""
    found = [
        parse_replica(one) for one in lines if one.strip() and not one.lstrip().startswith("#")
    ]
    names, places = set[str](), set[tuple[str, int]]()
    for one in found:
        if one.name in names:
            raise ValueError(f"{one.name!r} names two replicas; expected each name once")
        if (one.host, one.port) in places:
            raise ValueError(f"{one}: another replica has this address; expected each once")
        names.add(one.name)
        places.add((one.host, one.port))
    return tuple(found)


def find_problem(fleet: FleetConfig, models: Sequence[ReplicaSettings]) -> str:
    """Return what is wrong with these settings, and what would be right; "" if nothing is."""
    if not is_fleet_name(fleet.name):
        return f"fleet.name: {fleet.name[:80]!r}; expected {NAME_RULE}"
    if fleet.shared and (problem := find_address_problem(fleet.shared)):
        return f"fleet.shared: {problem}"
    for one in models:
        places = ("replicas", "replicas_file", "replicas_dns")
        given = [name for name in places if getattr(one, name)]
        if len(given) > 1:
            return f"{' and '.join(given)} are set; expected one of them"
        try:
            parse_replicas(one.replicas)
        except ValueError as error:
            return f"replicas: {error}"
        try:
            if one.replicas_dns:
                parse_replica(f"dns={one.replicas_dns}")
        except ValueError:
            return f"replicas_dns: {one.replicas_dns[:120]!r}; expected HOST:PORT"
    return ""


def find_address_problem(url: str) -> str:
    """Return what is wrong with the address of shared state; "" if nothing is."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme == "unix" and len(parts.path) > 1 and not parts.netloc and not parts.query:
        return ""
    number = parts.path.removeprefix("/")
    is_whole = parts.scheme in ("redis", "rediss") and parts.hostname and port
    if not is_whole or parts.query or not (number.isdecimal() or not number):
        return f"{url[:120]!r}; expected rediss://USER@HOST:PORT/NUMBER or unix:///PATH"
    if parts.password is not None:
        return f"a password in the address; expected it in {VARIABLE_OF_SHARED}"
    is_loopback = parts.hostname in ("localhost", "127.0.0.1", "::1")
    if not is_loopback and (parts.scheme != "rediss" or not parts.username):
        return f"{url[:120]!r} is not on loopback; expected TLS and a user: rediss://USER@HOST:PORT"
    return ""
