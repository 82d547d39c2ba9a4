"""Who may log in, and at whose server: TLS with authorities of a test's own, passwords over TCP."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import Struct

from tenancy.errors import StoreError
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Row
from tenancy.storage.postgres_connection import PostgresConnection
from tests.unit.tenancy.storage.postgres_server import BINARIES, PATIENCE_S, Server

PASSWORD = "p:ä \\ss"
ACCESS = """
local all all trust
hostssl ada ada 127.0.0.1/32 scram-sha-256
hostnossl eve eve 127.0.0.1/32 scram-sha-256
"""


class Place(Struct, frozen=True):
    """A server that asks for passwords, and is called localhost by the authority `ours`."""

    server: Server
    port: int
    ours: Path
    theirs: Path

    def url(self, user: str, host: str = "localhost", options: str = "") -> str:
        """To the user's own database. `options`: where none are given, those that are right."""
        return f"postgresql://{user}@{host}:{self.port}/{user}?{options or self.trusting}"

    @property
    def trusting(self) -> str:
        return f"sslrootcert={self.ours}"

    def run(self, *statements: str) -> list[Row]:
        """As its administrator: the rows of the last."""
        rows: list[Row] = []
        with closing(
            PostgresConnection(self.server.address("postgres"), {}, PATIENCE_S)
        ) as connection:
            for statement in statements:
                rows = connection.rows(statement)
        return rows

    def has_tls(self, word: str) -> None:
        """Whoever connects from now on finds it so."""
        self.run(f"alter system set ssl = {word}", "select pg_reload_conf()")
        until_s = time.monotonic() + PATIENCE_S
        while self.run("show ssl") != [(word,)]:
            assert time.monotonic() < until_s, "it does not read its settings"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    if BINARIES is None or shutil.which("openssl") is None:
        pytest.skip("PostgreSQL's binaries and openssl are not both here")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    folder = tmp_path_factory.mktemp("authorities")
    for name in ("ours", "theirs"):
        certify(folder, name, ["-addext", "basicConstraints=critical,CA:TRUE"])

    def prepare(home: Path) -> list[str]:
        by = ["-CA", f"{folder}/ours.crt", "-CAkey", f"{folder}/ours.key"]
        certify(home, "server", [*by, "-addext", "subjectAltName=DNS:localhost"])
        (home / "data" / "pg_hba.conf").write_text(ACCESS)
        files = [f"ssl_cert_file={home}/server.crt", f"ssl_key_file={home}/server.key"]
        return ["listen_addresses=127.0.0.1", *files]

    server = Server(prepare=prepare, port=port)
    found = Place(server, port, folder / "ours.crt", folder / "theirs.crt")
    found.has_tls("on")
    for user in ("ada", "eve"):
        found.run(f"create role {user} login password '{PASSWORD}'")
        found.run(f"create database {user} owner {user} encoding 'UTF8'")
    yield found
    server.close()


def certify(folder: Path, name: str, more: list[str]) -> None:
    """A key and a certificate for it, by itself or by an authority, for a day."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    out = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt"]
    command = ["openssl", "req", "-x509", *key, "-subj", f"/CN={name}", "-days", "1", *out, *more]
    subprocess.run(command, check=True, capture_output=True, timeout=20)
    (folder / f"{name}.key").chmod(0o600)


def refusal(url: str, environment: Mapping[str, str]) -> str:
    """Why it does not open; no password is in it."""
    with pytest.raises(StoreError) as caught:
        open_store(url, Path(), environment).close()
    assert PASSWORD not in caught.value.message
    return caught.value.message


def by_environment(_: Path, port: int) -> dict[str, str]:
    return {"PGPASSWORD": PASSWORD}


def by_file(folder: Path, port: int) -> dict[str, str]:
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    file = folder / ".pgpass"
    file.write_text(f"# ours\nlocalhost:{port}:ada:eve:other\nlocalhost:*:ada:ada:{escaped}\n")
    file.chmod(0o600)
    return {"HOME": str(folder)}


@pytest.mark.parametrize("way", [by_environment, by_file])
def test_a_password_opens_over_tls(place: Place, tmp_path: Path, way: object) -> None:
    """SCRAM, bound to the connection; the schema is made, and what is written is there."""
    assert callable(way)
    with closing(open_store(place.url("ada"), tmp_path, way(tmp_path, place.port))) as store:
        with store.change() as db:
            sql = "select ssl, version from pg_stat_ssl where pid = pg_backend_pid()"
            written = db.rows(sql)
        read = store.query(sql)
        tenants = store.query("select count(*) from tenants")

    assert [row[0][0] for row in (written, read)] == [True, True]
    assert written[0][1] in ("TLSv1.2", "TLSv1.3")
    assert tenants == [(0,)]


def test_without_tls_a_password_opens_where_that_is_said(place: Place, tmp_path: Path) -> None:
    """Eve's network is her own; her address says so."""
    url = place.url("eve", options="sslmode=disable")
    with closing(open_store(url, tmp_path, {"PGPASSWORD": PASSWORD})) as store:
        rows = store.query("select ssl from pg_stat_ssl where pid = pg_backend_pid()")

    assert rows == [(False,)]


def test_a_wrong_password_is_the_servers_to_refuse(place: Place, tmp_path: Path) -> None:
    """One that is not there at all, or in a line for somebody else, is told apart: it is looked for
    in other places."""
    wrong = refusal(place.url("ada"), {"PGPASSWORD": "guess"})
    missing = refusal(place.url("eve", options="sslmode=disable"), by_file(tmp_path, 1))

    assert wrong.endswith('password authentication failed for user "ada".')
    assert 'password authentication failed for user "eve". No password for it is in' in missing


def test_who_may_not_come_that_way_is_told_so(place: Place) -> None:
    """A server that wants encryption says that it does."""
    message = refusal(place.url("ada", options="sslmode=disable"), {"PGPASSWORD": PASSWORD})

    assert "no pg_hba.conf entry" in message
    assert "no encryption" in message


def test_a_server_must_show_a_certificate_by_a_known_authority(place: Place) -> None:
    """Else it is anybody's, and would be told the password's proof, and the ledger."""
    for options in (f"sslrootcert={place.theirs}", "sslmode=verify-full"):
        message = refusal(place.url("ada", options=options), {"PGPASSWORD": PASSWORD})

        assert "its certificate is refused" in message
        assert "sslrootcert=FILE" in message


def test_a_certificate_is_for_its_name_alone(place: Place) -> None:
    """The authority may have certified others."""
    message = refusal(place.url("ada", host="127.0.0.1"), {"PGPASSWORD": PASSWORD})

    assert "its certificate is refused: IP address mismatch" in message


def test_a_server_without_tls_is_refused_before_it_hears_who_asks(place: Place) -> None:
    """Whoever sits in between could say that there is none."""
    place.has_tls("off")
    try:
        message = refusal(place.url("ada"), {"PGPASSWORD": PASSWORD})
    finally:
        place.has_tls("on")

    assert "the server has no TLS" in message


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_an_authority_that_cannot_be_read_is_named(
    place: Place, tmp_path: Path, content: str | None
) -> None:
    """Not found, or something else."""
    file = tmp_path / "ours.pem"
    if content is not None:
        file.write_text(content)
    message = refusal(place.url("ada", options=f"sslrootcert={file}"), {})

    assert f"sslrootcert: {file} cannot be read" in message
