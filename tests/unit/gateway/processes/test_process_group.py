"""Several processes of a gateway start only with what they share."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest
from msgspec.structs import replace

from gateway.config import Config, ConfigError, ModelSettings, ServerConfig, TenancyConfig
from gateway.config.fleet import FleetConfig
from gateway.processes.process_group import check_processes, member_commands, reserve_port

WHOLE = Config(
    server=ServerConfig(processes=2),
    tenancy=TenancyConfig(database="postgresql://trunkline@db/trunkline"),
    fleet=FleetConfig(shared="redis://127.0.0.1:6379/0"),
    model=ModelSettings(replicas=("e0=127.0.0.1:7443",)),
)


def test_one_process_needs_nothing() -> None:
    check_processes(Config())


def test_several_processes_with_all_they_share_may_start() -> None:
    check_processes(WHOLE)


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        (replace(WHOLE, tenancy=TenancyConfig()), "PostgreSQL"),
        (replace(WHOLE, fleet=FleetConfig()), "fleet.shared"),
        (replace(WHOLE, model=ModelSettings()), "replicas"),
    ],
)
def test_what_several_processes_lack_is_named(lacking: Config, named: str) -> None:
    """In place of limits that hold twice, or of an engine for each."""
    with pytest.raises(ConfigError, match=f"server.processes = 2 needs .*{named}"):
        check_processes(lacking)


def test_a_reserved_port_is_shared_and_takes_no_connection() -> None:
    """Its holder does not listen: the kernel deals connections to those that do."""
    with closing(reserve_port("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with closing(reserve_port("127.0.0.1", port)) as member:
            member.listen()
            for _ in range(8):
                with socket.create_connection(("127.0.0.1", port), timeout=10):
                    accepted, _ = member.accept()
                    accepted.close()


def test_each_process_has_an_admin_listener_of_its_own() -> None:
    first, second = member_commands(["serve", "m"], "[::]:80", ("127.0.0.1", 8081), 2)

    assert first[-6:] == [
        *("--listen", "[::]:80", "--admin-listen", "127.0.0.1:8081", "--process", "0"),
    ]
    assert second[-3:] == ["127.0.0.1:8082", "--process", "1"]
    assert second[1:5] == ["-m", "gateway", "serve", "m"]
    assert "[::1]:80" in member_commands([], "[::1]:80", ("::1", 80), 1)[0][-4:]
