"""Certificates by which engines and gateways know each other: TLS 1.3, both sides, one authority.

A folder has `authority.pem`, `certificate.pem` and `key.pem`. A certificate names its holder in a
URI, `trunkline://engine/e0` or `trunkline://gateway/g0`; the name must be the one in `Hello`, so
host names are not checked: engines move between addresses. `trunkline fleet init` makes the files.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from engine.errors import EngineError

AUTHORITY: Final = "authority.pem"
CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"
SCHEME: Final = "trunkline://"
"""What begins the URI that names a certificate's holder."""


class TlsError(EngineError):
    """A certificate, its key or its authority cannot be used, or does not say what it should."""

    def __init__(self, message: str) -> None:
        super().__init__("unauthorized", message)


def tls_context(folder: Path, *, is_server: bool) -> ssl.SSLContext:
    """Return a context of one end with the files of a folder. Raises TlsError."""
    protocol = ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    at = folder / AUTHORITY
    try:
        context.load_verify_locations(at)
        at = folder / CERTIFICATE
        context.load_cert_chain(at, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        what = error.strerror or type(error).__name__
        raise TlsError(
            f"{at}: {what}; expected {AUTHORITY}, {CERTIFICATE} and {KEY} of one authority"
        ) from error
    return context


def holder_of(certificate: dict[str, Any] | None) -> str:
    """Return whom a peer's verified certificate names, such as `engine/e0`; "" for none."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(SCHEME):
            return str(value[len(SCHEME) :])
    return ""
