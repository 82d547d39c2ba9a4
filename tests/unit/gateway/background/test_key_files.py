"""Keys that a configuration declares by file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.background.config_reload import with_digests
from gateway.config import ConfigError
from tenancy.accounts.declared_keys import DeclaredKey
from tenancy.accounts.declared_tenants import DeclaredTenant
from tenancy.accounts.keys import digest_of

KEY = "tl-" + "K" * 43


def declare_from(file: Path) -> DeclaredKey:
    """Return a key declared by its file, with its digest."""
    key = DeclaredKey(label="web", file=str(file), requests_at_once=2)
    (tenant,) = with_digests([DeclaredTenant(name="ada", weight=2, keys=(key,))])
    assert (tenant.name, tenant.weight) == ("ada", 2)
    return tenant.keys[0]


def write_file(file: Path, text: bytes, mode: int = 0o600) -> Path:
    """Write a file with this content and mode."""
    file.write_bytes(text)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f" {KEY}\r\n"])
def test_key_file_becomes_a_digest(tmp_path: Path, text: str) -> None:
    """Editors and shells end a file with a newline."""
    key = declare_from(write_file(tmp_path / "web", text.encode(), 0o400))

    assert key == DeclaredKey(label="web", sha256=digest_of(KEY).hex(), requests_at_once=2)


def test_a_declared_digest_stays_unchanged() -> None:
    tenants = [DeclaredTenant(name="ada", keys=(DeclaredKey(label="web", sha256="0" * 64),))]

    assert with_digests(tenants) == tenants


@pytest.mark.parametrize(
    ("text", "mode", "what"),
    [
        (KEY.encode(), 0o644, "chmod 600"),
        (KEY.encode(), 0o640, "chmod 600"),
        (b"", 0o600, "has no key"),
        (b"secret", 0o600, "has no key"),
        (KEY.encode() + b"K", 0o600, "has no key"),
        (b"\xff" * 5_000, 0o600, "has no key"),
    ],
)
def test_error_names_the_file_without_its_content(
    tmp_path: Path, text: bytes, mode: int, what: str
) -> None:
    file = write_file(tmp_path / "web", text, mode)

    with pytest.raises(ConfigError, match=what) as caught:
        declare_from(file)
    assert f"tenants: ada: key 'web': {file}" in str(caught.value)
    assert "KKK" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_refuses_a_pipe_without_blocking(tmp_path: Path) -> None:
    """A pipe without a writer would stop every reload."""
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(ConfigError, match="is not a regular file"):
        declare_from(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        declare_from(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        declare_from(tmp_path / "gone")
