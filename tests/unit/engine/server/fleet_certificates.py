"""Certificates of a fleet for tests, made when they are first asked for."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from gateway.engines.elsewhere.certificates import make_certificates


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fleet-")


@cache
def certificate(holder: str, authority: str = "ours") -> Path:
    """Return the folder of a holder's certificate, such as `engine/e0`."""
    (made,) = make_certificates(Path(_folder().name) / authority, [holder])
    return made


@cache
def expired(holder: str) -> Path:
    """Return the folder of a certificate that has expired."""
    certificate(holder)  # the authority is valid
    earlier = datetime.now(UTC) - timedelta(days=100)
    folder = Path(_folder().name) / "ours"
    (made,) = make_certificates(folder, [f"{holder}.expired"], now=earlier, days=90)
    return made
