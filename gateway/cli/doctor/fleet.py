"""What `trunkline doctor` says of the certificate that a gateway shows to engines elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from engine.client.tls_files import CERTIFICATE, TlsError, tls_context
from gateway.cli.doctor.check import Check
from gateway.config import Config

DAYS_LEFT_MIN: Final = 14
"""Days before its end from which a certificate is a finding."""
_NAME = "fleet"
_RENEW = "trunkline fleet init makes new ones with the same authority; copy them to their places"


def check_fleet(config: Config, now: datetime | None = None) -> list[Check]:
    """Return the findings; none if no model is elsewhere. `now`: default: this instant."""
    if not any(one.is_elsewhere for one in config.served_models()):
        return []
    folder = config.fleet_folder
    try:
        tls_context(folder, is_server=False)
    except TlsError as error:
        return [Check(_NAME, False, error.message, _RENEW)]
    try:
        from gateway.engines.elsewhere.certificates import read_expiry
    except ImportError:
        return [Check(_NAME, True, f"{folder}; install trunkline[fleet] to see its end")]
    until = read_expiry(folder / CERTIFICATE)
    left = until - (now or datetime.now(UTC))
    found = f"{folder / CERTIFICATE} is valid until {until:%Y-%m-%d}"
    if left.total_seconds() <= 0:
        return [
            Check(_NAME, False, f"{folder / CERTIFICATE} has expired: {until:%Y-%m-%d}", _RENEW)
        ]
    return [Check(_NAME, True, found, _RENEW if left.days < DAYS_LEFT_MIN else None)]
