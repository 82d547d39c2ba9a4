"""What `trunkline doctor` says of engines elsewhere, and of the certificate that they are shown."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from engine.client.tls_files import CERTIFICATE, TlsError, check_certificate
from gateway.cli.doctor.check import Check
from gateway.config import Config
from gateway.config.fleet import ReplicaAddress, ReplicaSettings, parse_replicas

DAYS_LEFT_MIN: Final = 14
"""Days before its end from which a certificate is a finding."""
CONNECT_S: Final = 3.0
"""Longest wait for an engine's host."""
ASKED_AT_ONCE: Final = 32
_NAME, _ENGINES = "fleet", "fleet engines"
_RENEW = "trunkline fleet init makes new ones with the same authority; copy them to their places"


def check_fleet(config: Config, now: datetime | None = None) -> list[Check]:
    """Return the findings; none if no model is elsewhere. `now`: default: this instant."""
    if not any(one.is_elsewhere for one in config.served_models()):
        return []
    folder = config.fleet_folder
    try:
        check_certificate(folder, f"gateway/{config.fleet.name}")
    except TlsError as error:
        return [Check(_NAME, False, error.message, _RENEW)]
    try:
        from gateway.engines.elsewhere.certificates import read_expiry
    except ImportError:
        return [Check(_NAME, True, f"{folder}; install trunkline[fleet] to see its end")]
    until = read_expiry(folder / CERTIFICATE)
    left = until - (now or datetime.now(UTC))
    found = f"{folder / CERTIFICATE} is valid until {until:%Y-%m-%d}"
    return [Check(_NAME, True, found, _RENEW if left.days < DAYS_LEFT_MIN else None)]


def check_engines(config: Config) -> list[Check]:
    """Return whether something listens at the engines' addresses; nothing if none is listed. One
    that does not is advice, since the others serve. Cost: a connection to each."""
    try:
        listed = [one for model in config.served_models() for one in _addresses_of(model)]
    except (OSError, ValueError) as error:
        fix = "put NAME=HOST:PORT of an engine on each line of model.replicas_file"
        return [Check(_ENGINES, False, str(error), fix)]
    if not listed:
        return []
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        problems = [one for one in pool.map(_connect, listed) if one]
    some = f"{len(listed) - len(problems)} of {len(listed)} can be reached"
    if not problems:
        return [Check(_ENGINES, True, some)]
    found = "; ".join((some, *problems[:8]))
    fix = "start it (trunkline engine serve), let this host in, or correct its line in replicas"
    return [Check(_ENGINES, len(problems) < len(listed), found, fix)]


def _addresses_of(model: ReplicaSettings) -> tuple[ReplicaAddress, ...]:
    if model.replicas_file:
        return parse_replicas(Path(model.replicas_file).read_text().splitlines())
    return parse_replicas(model.replicas)


def _connect(address: ReplicaAddress) -> str:
    """Return why an address cannot be reached; "" if it can be."""
    try:
        socket.create_connection((address.host, address.port), CONNECT_S).close()
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""
