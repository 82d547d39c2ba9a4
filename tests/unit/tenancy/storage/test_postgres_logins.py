"""Logins: TLS with test authorities, passwords over TCP."""

from __future__ import annotations

import shutil
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from msgspec import Struct

from tenancy.errors import StoreError
from tenancy.storage.backends import open_store
from tenancy.storage.interface import Row
from tenancy.storage.postgres_connection import PostgresConnection
from tests.ports import free_ports
from tests.unit.tenancy.storage.postgres_server import BINARIES, PATIENCE_S, Server

PASSWORD = "p:ä \\ss"
ACCESS = """
local all all trust
hostssl ada ada 127.0.0.1/32 scram-sha-256
hostnossl eve eve 127.0.0.1/32 scram-sha-256
"""


class LoginServer(Struct, frozen=True):
    """A server that requires passwords; the authority `ours` certifies it as localhost."""

    server: Server
    port: int
    ours: Path
    theirs: Path

    def url(self, user: str, host: str = "localhost", options: str = "") -> str:
        """Return the URL of the user's own database. `options`: by default the right ones."""
        return f"postgresql://{user}@{host}:{self.port}/{user}?{options or self.trusting}"

    @property
    def trusting(self) -> str:
        return f"sslrootcert={self.ours}"

    def run(self, *statements: str) -> list[Row]:
        """Run statements as administrator; return the rows of the last."""
        rows: list[Row] = []
        with closing(
            PostgresConnection(self.server.address("postgres"), {}, PATIENCE_S)
        ) as connection:
            for statement in statements:
                rows = connection.rows(statement)
        return rows

    def has_tls(self, word: str) -> None:
        """Switch TLS on or off for new connections."""
        self.run(f"alter system set ssl = {word}", "select pg_reload_conf()")
        until_s = time.monotonic() + PATIENCE_S
        while self.run("show ssl") != [(word,)]:
            assert time.monotonic() < until_s, "it does not read its settings"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with free_ports(1) as (found,):
        yield found


@pytest.fixture(scope="module")
def login_server(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[LoginServer]:
    if BINARIES is None or shutil.which("openssl") is None:
        pytest.skip("PostgreSQL's binaries and openssl are not both here")
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
    found = LoginServer(server, port, folder / "ours.crt", folder / "theirs.crt")
    found.has_tls("on")
    for user in ("ada", "eve"):
        found.run(f"create role {user} login password '{PASSWORD}'")
        found.run(f"create database {user} owner {user} encoding 'UTF8'")
    yield found
    server.close()


def certify(folder: Path, name: str, more: list[str]) -> None:
    """Make a key and a certificate for a day, signed by itself or by an authority."""
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc"]
    out = ["-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}.crt"]
    command = ["openssl", "req", "-x509", *key, "-subj", f"/CN={name}", "-days", "1", *out, *more]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    (folder / f"{name}.key").chmod(0o600)


def refusal(url: str, environment: Mapping[str, str]) -> str:
    """Return why the store does not open, and check that no password is in it."""
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
def test_logs_in_by_password_over_tls(
    login_server: LoginServer, tmp_path: Path, way: object
) -> None:
    """SCRAM with channel binding; the schema is created and data is written."""
    assert callable(way)
    with closing(
        open_store(login_server.url("ada"), tmp_path, way(tmp_path, login_server.port))
    ) as store:
        with store.change() as db:
            sql = "select ssl, version from pg_stat_ssl where pid = pg_backend_pid()"
            written = db.rows(sql)
        read = store.query(sql)
        tenants = store.query("select count(*) from tenants")

    assert [row[0][0] for row in (written, read)] == [True, True]
    assert written[0][1] in ("TLSv1.2", "TLSv1.3")
    assert tenants == [(0,)]


def test_logs_in_without_tls_if_the_url_allows_it(
    login_server: LoginServer, tmp_path: Path
) -> None:
    url = login_server.url("eve", options="sslmode=disable")
    with closing(open_store(url, tmp_path, {"PGPASSWORD": PASSWORD})) as store:
        rows = store.query("select ssl from pg_stat_ssl where pid = pg_backend_pid()")

    assert rows == [(False,)]


def test_wrong_password_is_refused_by_the_server(login_server: LoginServer, tmp_path: Path) -> None:
    """A missing password is reported differently, with the places where it is looked up."""
    wrong = refusal(login_server.url("ada"), {"PGPASSWORD": "guess"})
    missing = refusal(login_server.url("eve", options="sslmode=disable"), by_file(tmp_path, 1))

    assert wrong.endswith('password authentication failed for user "ada".')
    assert 'password authentication failed for user "eve". No password for it is in' in missing


def test_reports_a_server_that_requires_tls(login_server: LoginServer) -> None:
    message = refusal(login_server.url("ada", options="sslmode=disable"), {"PGPASSWORD": PASSWORD})

    assert "no pg_hba.conf entry" in message
    assert "no encryption" in message


def test_requires_certificate_of_a_known_authority(login_server: LoginServer) -> None:
    """Any other server would get the password's proof, and the ledger."""
    for options in (f"sslrootcert={login_server.theirs}", "sslmode=verify-full"):
        message = refusal(login_server.url("ada", options=options), {"PGPASSWORD": PASSWORD})

        assert "its certificate is refused" in message
        assert "sslrootcert=FILE" in message


def test_requires_certificate_for_the_host_name(login_server: LoginServer) -> None:
    """The authority may have certified other hosts."""
    message = refusal(login_server.url("ada", host="127.0.0.1"), {"PGPASSWORD": PASSWORD})

    assert "its certificate is refused: IP address mismatch" in message


def test_refuses_server_without_tls_before_login(login_server: LoginServer) -> None:
    """An attacker in between could claim that the server has none."""
    login_server.has_tls("off")
    try:
        message = refusal(login_server.url("ada"), {"PGPASSWORD": PASSWORD})
    finally:
        login_server.has_tls("on")

    assert "the server has no TLS" in message


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_reports_unreadable_root_certificate(
    login_server: LoginServer, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "ours.pem"
    if content is not None:
        file.write_text(content)
    message = refusal(login_server.url("ada", options=f"sslrootcert={file}"), {})

    assert f"sslrootcert: {file} cannot be read" in message


def test_refused_login_closes_its_connection_though_the_server_keeps_it(tmp_path: Path) -> None:
    """TLS asks the server for a goodbye; a slow server must not leave the socket open."""
    certify(tmp_path, "server", ["-addext", "subjectAltName=DNS:localhost"])
    url = "postgresql://ada@localhost:{}/ada?sslrootcert={}/server.crt"
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(PATIENCE_S)
        ended = pool.submit(refuse_and_listen, listener, tmp_path)
        port = int(listener.getsockname()[1])
        with pytest.raises(StoreError, match="no such login"):
            open_store(url.format(port, tmp_path), Path(), {"PGPASSWORD": PASSWORD})

        assert ended.result(PATIENCE_S)


def refuse_and_listen(listener: socket.socket, folder: Path) -> bool:
    """Refuse one login over TLS and keep the connection. Returns True once the client closes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    with listener.accept()[0] as plain:
        plain.settimeout(PATIENCE_S)
        plain.recv(8)  # the request for TLS
        plain.sendall(b"S")
        with context.wrap_socket(plain, server_side=True, suppress_ragged_eofs=True) as secure:
            secure.recv(4096)  # the startup message
            fields = b"SFATAL\0VFATAL\0C28000\0Mno such login\0\0"
            secure.sendall(b"E" + struct.pack("!i", len(fields) + 4) + fields)
            return not secure.recv(1)
