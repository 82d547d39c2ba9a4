"""A gateway's id: one process at a time runs as it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gateway.shared.gateway_id import ID_FILE, GatewayIdHold, read_gateway_id, take_gateway_id
from tenancy.errors import StoreError
from tenancy.storage.interface import Store
from tests.fakes import FakeClock
from tests.unit.tenancy.conftest import on_server
from tests.unit.tenancy.storage.new_sqlite import new_sqlite
from tests.unit.tenancy.storage.postgres_server import Server

END_HOLDERS = (
    "select pg_terminate_backend(pid, 60000) from pg_locks"
    " where locktype = 'advisory' and pid <> pg_backend_pid() and objsubid = 1"
)


@pytest.fixture
def server_store(postgres_server: Server) -> Iterator[Store]:
    """A database that several gateways may have."""
    with on_server(postgres_server) as store:
        yield store


def test_a_copied_data_directory_is_refused_by_name(server_store: Store, tmp_path: Path) -> None:
    """The message names the id, its file, and what to do about either case."""
    ours, copied = tmp_path / "ours", tmp_path / "copied"
    ours.mkdir()
    name = take_gateway_id(ours, server_store)
    shutil.copytree(ours, copied)
    waited: list[float] = []
    with closing(server_store.open_another()) as beside:
        with pytest.raises(StoreError) as refused:
            take_gateway_id(copied, beside, pause=waited.append)
        (copied / ID_FILE).unlink()
        other = take_gateway_id(copied, beside)

    assert refused.value.code == "gateway_id_taken"
    assert name in refused.value.message
    assert str(copied / ID_FILE) in refused.value.message
    assert sum(waited) == 20.0
    assert other != name


def test_a_restart_takes_the_id_again(server_store: Store, tmp_path: Path) -> None:
    """Whoever looks meanwhile sees that nobody runs as it."""
    with closing(server_store.open_another()) as first:
        name = take_gateway_id(tmp_path, first)
        held = server_store.is_gateway_held(name)
    after = server_store.is_gateway_held(name)
    with closing(server_store.open_another()) as second:
        again = take_gateway_id(tmp_path, second, patience_s=0.0)

    assert (held, after, again) == (True, False, name)


def test_a_lost_connection_is_opened_again(server_store: Store, tmp_path: Path) -> None:
    """A server that restarts ends all sessions, and with them the locks. A gateway that lost its id
    to another one meanwhile says so, once."""
    name = take_gateway_id(tmp_path, server_store)
    lines: list[str] = []
    hold = GatewayIdHold(server_store, name, lambda event, facts: lines.append(event), FakeClock())
    with closing(server_store.open_another()) as beside:
        beside.query(END_HOLDERS)
        lost = beside.is_gateway_held(name)
        asyncio.run(hold.renew())
        again = beside.is_gateway_held(name)
        beside.query(END_HOLDERS)
        assert beside.hold_gateway(name)
        for _ in range(2):
            asyncio.run(hold.renew())

    assert (lost, again, lines) == (False, True, ["gateway_id_taken"])


def test_a_file_has_one_gateway_without_an_id(tmp_path: Path) -> None:
    """The lock beside the file admits one."""
    with closing(new_sqlite(tmp_path / "a.db")) as store:
        assert take_gateway_id(tmp_path, store) == read_gateway_id(tmp_path, store) == ""
        assert not (tmp_path / ID_FILE).exists()
