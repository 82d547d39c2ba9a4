"""Keys that are declared by the file that each is in."""

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


def read(file: Path) -> DeclaredKey:
    """A key that is declared by its file, as it is declared then."""
    key = DeclaredKey(label="web", file=str(file), requests_at_once=2)
    (tenant,) = with_digests([DeclaredTenant(name="ada", weight=2, keys=(key,))])
    assert (tenant.name, tenant.weight) == ("ada", 2)
    return tenant.keys[0]


def kept(file: Path, text: bytes, mode: int = 0o600) -> Path:
    """A file with this in it."""
    file.write_bytes(text)
    file.chmod(mode)
    return file


@pytest.mark.parametrize("text", [KEY, f"{KEY}\n", f" {KEY}\r\n"])
def test_a_key_in_a_file_is_declared_by_its_digest(tmp_path: Path, text: str) -> None:
    """Editors and shells end a file with a line's end."""
    key = read(kept(tmp_path / "web", text.encode(), 0o400))

    assert key == DeclaredKey(label="web", sha256=digest_of(KEY).hex(), requests_at_once=2)


def test_a_key_that_is_declared_by_its_digest_is_left_as_it_is() -> None:
    """There is nothing to read."""
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
def test_a_file_that_cannot_be_is_told_by_its_place(
    tmp_path: Path, text: bytes, mode: int, what: str
) -> None:
    """Whose key, which file; and nothing of what is in it."""
    file = kept(tmp_path / "web", text, mode)

    with pytest.raises(ConfigError, match=what) as caught:
        read(file)
    assert f"tenants: ada: key 'web': {file}" in str(caught.value)
    assert "KKK" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe that nobody writes to would stop every reload."""
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(ConfigError, match="is not a regular file"):
        read(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(tmp_path / "gone")
