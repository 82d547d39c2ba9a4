"""`trunkline fleet` without a cluster: what is wrong with the command, and what is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.unit.engine.server.fleet_certificates import certificate, expired
from tests.unit.gateway.cli.command_output import Run, error_line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--names", "e0,e0"), "'e0' names two engines; expected each name once"),
        (("--replicas", "65"), "65 engines; expected 1 to 64"),
        (("--replicas", "1", "--ports", "9-3"), "--ports: '9-3'; expected FIRST-LAST"),
        (("--replicas", "1", "--tls", "here"), "--tls: here; expected an absolute path"),
        (("--replicas", "1", "--host-config", "a.toml"), "--host-config: a.toml; expected an abs"),
    ],
)
def test_a_wrong_fleet_is_refused_before_a_cluster_is_asked(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    """No cluster is at this address."""
    assert message in error_line(run, "fleet", "up", *arguments, "--address", "127.0.0.1:1")


def test_an_address_without_a_cluster_is_said_at_once(run: Run) -> None:
    """Ray itself would try for minutes."""
    with free_ports(1) as (port,):
        line = error_line(run, "fleet", "status", "--address", f"127.0.0.1:{port}")

    assert f"--address 127.0.0.1:{port}: Connection refused; expected the HOST:PORT" in line


def test_an_address_without_a_gateway_is_named(run: Run) -> None:
    """Nothing is measured."""
    with free_ports(1) as (port,):
        line = error_line(run, "fleet", "wanted", "--gateway", f"127.0.0.1:{port}")

    assert f"no gateway answers at 127.0.0.1:{port}" in line


def test_a_file_that_is_no_list_is_not_watched(run: Run, tmp_path: Path) -> None:
    """It is not overwritten, either."""
    file = tmp_path / "notes"
    file.write_text("dear diary\n")
    line = error_line(run, "fleet", "watch", "--file", str(file))

    assert "expected NAME=HOST:PORT" in line
    assert file.read_text() == "dear diary\n"


def test_a_drain_says_where_no_engine_of_the_name_serves(run: Run, data: Path) -> None:
    """A wrong name, or a wrong data directory, must not look like a drain."""
    status, elsewhere, _ = run("engine", "drain", "e9")
    (data / "engines" / "e9.serves").touch()
    _, here, _ = run("engine", "drain", "e9")

    assert status == 0
    assert "e9 serves nowhere in " in elsewhere
    assert here.startswith("e9 drains")


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        (expired("engine/e0"), "certificate has expired; expected one that is valid today"),
        (certificate("engine/e1"), "the certificate names 'engine/e1'; expected 'engine/e0'"),
    ],
)
def test_a_certificate_that_gateways_would_refuse_is_refused(
    run: Run, data: Path, folder: Path, says: str
) -> None:
    """Before a model is looked for."""
    serve = ("engine", "serve", "--name", "e0", "--listen", "127.0.0.1:0")
    line = error_line(run, *serve, "--tls", str(folder))

    assert f"{folder / 'certificate.pem'}: the certificate " in line
    assert says in line


def test_a_server_imports_no_ray() -> None:
    """It takes a second and 100 MB, and a gateway knows no cluster."""
    program = (
        "import sys, gateway.__main__, gateway.cli.serve, gateway.cli.fleet.engine, gateway.app\n"
        "import gateway.cli.fleet.fleet\n"
        "sys.exit(any(name.partition('.')[0] == 'ray' for name in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
