"""The address of a PostgreSQL database, and the password for it.

An address is a URL, `postgresql://[USER@][HOST[:PORT]]/DATABASE[?host=FOLDER]`. Settings and logs
show it, so it may not contain a password; the password is in the environment (PGPASSWORD) or in a
password file (PGPASSFILE, ~/.pgpass), as for PostgreSQL's own programs. asyncpg's own parsing is
not used: it accepts passwords and unchecked certificates, ignores `?host=` beside a port, and keeps
the escapes of a password file. This module connects to nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from tenancy.errors import StoreError

PORT = 5432
SOCKET_FOLDER = "/run/postgresql"
_OPTIONS = ("host", "sslmode", "sslrootcert")


class PostgresAddress(Struct, frozen=True):
    """The address of a database.

    A TCP connection `is_encrypted` and its certificate checked, unless the URL has
    `sslmode=disable`.
    """

    database: str
    user: str
    host: str
    port: int
    folder: str
    """The folder of the server's Unix socket; empty for TCP."""
    is_encrypted: bool
    root_certificate: str
    password: str | None

    def __repr__(self) -> str:
        return f"PostgresAddress({self.shown!r})"

    @property
    def shown(self) -> str:
        """Return database, place and port, without a secret."""
        place = self.folder or self.host
        return f"PostgreSQL database {self.database} at {place}, port {self.port}"


def read_address(url: str, environment: Mapping[str, str], system_user: str) -> PostgresAddress:
    """Parse a URL and find its password. Raises StoreError."""
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
        options = dict(parse_qsl(parts.query, strict_parsing=True) if parts.query else ())
    except ValueError as error:
        raise _address_error(f"it cannot be read: {error}") from error
    if parts.scheme not in ("postgresql", "postgres"):
        raise _address_error("it must begin with postgresql://")
    if parts.password is not None:
        raise _address_error(
            "no password may stand in it; put the password into the environment, PGPASSWORD, or a"
            " password file, ~/.pgpass"
        )
    for name in options.keys() - set(_OPTIONS):
        raise _address_error(f"{name[:40]!r} is not an option; expected {', '.join(_OPTIONS)}")
    mode = options.get("sslmode", "verify-full")
    if mode not in ("verify-full", "disable"):
        raise _address_error(
            f"sslmode is {mode[:40]!r}; expected verify-full or disable. Encryption without a"
            " checked certificate protects nothing; sslrootcert=FILE names an authority of your own"
        )
    database, user = unquote(parts.path[1:]), unquote(parts.username or "")
    if not database or "/" in database or "\0" in url:
        raise _address_error("it must end with /DATABASE")
    user = user or environment.get("PGUSER") or system_user
    host = options.get("host") or parts.hostname or SOCKET_FOLDER
    if "," in host:
        raise _address_error(
            "it must name one server; that may be a name that moves with the primary"
        )
    folder = host if host.startswith("/") else ""
    return PostgresAddress(
        database=database,
        user=user,
        host="" if folder else host,
        port=port,
        folder=folder,
        is_encrypted=not folder and mode == "verify-full",
        root_certificate=options.get("sslrootcert", ""),
        password=_password(environment, (host, str(port), database, user), bool(folder)),
    )


def _address_error(why: str) -> StoreError:
    return StoreError("bad_address", f"The address of the database is wrong: {why}.")


def _password(
    environment: Mapping[str, str], fields_wanted: tuple[str, ...], is_local: bool
) -> str | None:
    """Return PGPASSWORD, or the password of the first matching line of the password file."""
    if password := environment.get("PGPASSWORD"):
        return password
    home = environment.get("HOME")
    name = environment.get("PGPASSFILE") or (f"{home}/.pgpass" if home else "")
    if not name:
        return None
    file = Path(name)
    try:
        if not file.is_file():
            return None
        if file.stat().st_mode & 0o077:
            message = f"{file} can be read by others than its owner; chmod 600 it."
            raise StoreError("bad_password_file", message)
        lines = file.read_text().splitlines()
    except OSError as error:
        raise StoreError("bad_password_file", f"{file}: {error.strerror}.") from error
    for line in lines:
        *fields, password = (re.sub(r"\\(.)", r"\1", field) for field in _FIELD.findall(line)[:5])
        if is_local and fields[:1] == ["localhost"]:
            fields[0] = fields_wanted[0]
        if len(fields) == 4 and all(
            map(lambda have, want: have in ("*", want), fields, fields_wanted)
        ):
            return password
    return None


_FIELD = re.compile(r"(?:^|(?<=:))((?:[^:\\]|\\.)*)")
