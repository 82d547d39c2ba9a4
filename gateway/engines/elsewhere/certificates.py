"""Makes the authority of a fleet and the certificates of its engines and gateways.

The only importer of `cryptography` here: `trunkline fleet init` and `trunkline doctor` import this
module, and a gateway never does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from engine.client.tls_files import AUTHORITY, CERTIFICATE, KEY, SCHEME

AUTHORITY_KEY: Final = "authority-key.pem"
LIFE_DAYS: Final = 90
AUTHORITY_DAYS: Final = 3_650
EARLIER: Final = timedelta(minutes=5)
"""Clocks differ: a certificate is valid from before it was made."""


def make_certificates(
    folder: Path, holders: Sequence[str], *, now: datetime | None = None, days: int = LIFE_DAYS
) -> list[Path]:
    """Make the authority of a folder unless it exists, and for each holder, such as `engine/e0`, a
    folder `engine-e0` with its certificate, key and authority. Returns the new folders. Raises
    OSError and ValueError."""
    now = now or datetime.now(UTC)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (folder / AUTHORITY_KEY).exists():
        _make_authority(folder, now)
    authority = x509.load_pem_x509_certificate((folder / AUTHORITY).read_bytes())
    key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    made = []
    for holder in holders:
        own = folder / holder.replace("/", "-")
        own.mkdir(mode=0o700, exist_ok=True)
        own_key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(holder, authority.subject, own_key, now, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(SCHEME + holder)]),
                critical=False,
            )
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .sign(key, hashes.SHA256())
        )
        _write(own / KEY, _key_bytes(own_key))
        _write(own / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))
        _write(own / AUTHORITY, authority.public_bytes(serialization.Encoding.PEM))
        made.append(own)
    return made


def read_expiry(path: Path) -> datetime:
    """Return the instant from which a certificate is not valid any more. Raises OSError and
    ValueError."""
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def _make_authority(folder: Path, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trunkline fleet")])
    certificate = (
        _builder("", name, key, now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                **dict.fromkeys(
                    (
                        *("digital_signature", "content_commitment", "key_encipherment"),
                        *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
                    ),
                    False,
                ),
                key_cert_sign=True,
                crl_sign=True,
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    _write(folder / AUTHORITY_KEY, _key_bytes(key))
    _write(folder / AUTHORITY, certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    holder: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    days: int,
) -> x509.CertificateBuilder:
    subject = issuer
    if holder:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, holder[:64])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _key_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, data: bytes) -> None:
    """Write a file that its owner alone may read, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    part.replace(path)
