"""Certificates by which engines and gateways know each other: TLS 1.3, both sides, one authority.

A folder has `authority.pem`, `certificate.pem` and `key.pem`. A certificate names its holder in a
URI, `trunkline://engine/e0` or `trunkline://gateway/g0`; the name must be the one in `Hello`, so
host names are not checked: engines move between addresses. `trunkline fleet init` makes the files.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from engine.errors import EngineError

AUTHORITY: Final = "authority.pem"
CERTIFICATE: Final = "certificate.pem"
KEY: Final = "key.pem"
SCHEME: Final = "trunkline://"
"""What begins the URI that names a certificate's holder."""
_NOT_TODAY: Final = (9, 10)
"""OpenSSL's codes for a certificate that is not valid yet, and one that has expired."""


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


def check_certificate(folder: Path, holder: str) -> None:
    """Check a holder's own certificate as the others will, by a handshake in memory with itself;
    `holder`: whom it has to name, such as `engine/e0`. A few milliseconds. Raises TlsError."""
    server, client = tls_context(folder, is_server=True), tls_context(folder, is_server=False)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    dialling = client.wrap_bio(back, there, server_hostname="engine")
    accepting = server.wrap_bio(there, back, server_side=True)
    at = folder / CERTIFICATE
    try:
        for end in (dialling, accepting, dialling, accepting):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        raise TlsError(f"{at}: {told(error)}") from error
    if (named := holder_of(accepting.getpeercert())) != holder:
        raise TlsError(f"{at}: the certificate names {named!r}; expected {holder!r}")


def told(error: Exception) -> str:
    """Return what a failed connection says of itself, without the place in OpenSSL's sources."""
    if isinstance(error, ssl.SSLCertVerificationError):
        right = f"one of the authority in {AUTHORITY}"
        if error.verify_code in _NOT_TODAY:
            right = "one that is valid today, as trunkline fleet init makes it"
        return f"the certificate is not accepted: {error.verify_message}; expected {right}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no TLS").replace("_", " ").lower()
    return str(error) or type(error).__name__


def holder_of(certificate: dict[str, Any] | None) -> str:
    """Return whom a peer's verified certificate names, such as `engine/e0`; "" for none."""
    for kind, value in (certificate or {}).get("subjectAltName", ()):
        if kind == "URI" and value.startswith(SCHEME):
            return str(value[len(SCHEME) :])
    return ""
