"""Addresses of servers: what a URL may say, and where passwords are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenancy.errors import StoreError
from tenancy.storage.postgres_address import read_address
from tests.tables import each_row


def test_an_address_is_parsed_and_encrypted_by_default() -> None:
    """TLS with a checked certificate by default."""
    address = read_address("postgresql://ada@db.example:6000/books", {}, "me")

    assert (address.database, address.user) == ("books", "ada")
    assert (address.host, address.port, address.is_encrypted) == ("db.example", 6000, True)


def test_url_without_host_is_the_local_socket() -> None:
    """As for PostgreSQL's own programs; a folder may be given."""
    usual = read_address("postgresql:///books", {}, "me")
    other = read_address("postgres:///books?host=/tmp/pg", {"PGUSER": "eve"}, "me")

    assert (usual.folder, usual.user, usual.port) == ("/run/postgresql", "me", 5432)
    assert (other.folder, other.user, other.is_encrypted) == ("/tmp/pg", "eve", False)


@each_row(
    ("url", "why"),
    [
        ("postgresql://ada:secret@h/books", "no password may stand in it"),
        ("postgresql://h", "/DATABASE"),
        ("postgresql://h/a/b", "/DATABASE"),
        ("postgresql://h:port/books", "cannot be read"),
        ("postgresql://h/books?password=secret", "'password' is not an option"),
        (
            "postgresql://h/books?sslmode=require",
            "sslmode is 'require'; expected",
        ),
        (
            "postgresql://h/books?sslcert=me.crt",
            "'sslcert' is not an option; expected host, sslmode, sslrootcert",
        ),
        ("postgresql://one,two/books", "one server"),
        ("mysql://h/books", "must begin with"),
    ],
)
def test_refuses_wrong_address_with_the_reason(url: str, why: str) -> None:
    """Settings are shown and logged, so a password in one is refused, too."""
    with pytest.raises(StoreError, match=why) as caught:
        read_address(url, {}, "me")

    assert "secret" not in caught.value.message


def test_password_of_the_environment_is_never_shown() -> None:
    """Not in the address's repr either."""
    address = read_address("postgresql://ada@h/books", {"PGPASSWORD": "secret"}, "me")

    assert address.password == "secret"
    assert "secret" not in f"{address!r} {address} {address.shown}"


def test_password_file_matches_host_port_database_and_user(tmp_path: Path) -> None:
    """The first line that matches; a backslash escapes a character."""
    file = tmp_path / ".pgpass"
    file.write_text("# ours\nh:5432:other:*:no\nh:*:books:ada:a\\:b\\\\c\n*:*:*:*:last\n")
    file.chmod(0o600)
    home = {"HOME": str(tmp_path)}
    one = read_address("postgresql://ada@h/books", home, "me").password
    other = read_address("postgresql://eve@h/books", home, "me").password
    named = {"PGPASSFILE": str(file)}
    local = read_address("postgresql:///books", named, "me").password

    assert (one, other, local) == ("a:b\\c", "last", "last")


def test_refuses_password_file_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / ".pgpass"
    file.write_text("*:*:*:*:secret\n")
    file.chmod(0o644)

    with pytest.raises(StoreError, match="chmod 600"):
        read_address("postgresql:///books", {"HOME": str(tmp_path)}, "me")
