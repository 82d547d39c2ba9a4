"""Which database a setting names."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from tenancy.errors import StoreError
from tenancy.storage.backends import check_place, describe_place, open_store
from tenancy.storage.postgres import PostgresStore
from tenancy.storage.sqlite import SqliteStore
from tests.unit.tenancy.storage.postgres_server import Server


def test_name_is_a_file_in_the_data_folder(tmp_path: Path) -> None:
    """The default."""
    before = describe_place("t.db", tmp_path, {})
    store = open_store("t.db", tmp_path, {})
    store.close()

    assert before == f"{tmp_path / 't.db'}, made at the first start"
    assert isinstance(store, SqliteStore)
    assert describe_place("t.db", tmp_path, {}) == store.place == str(tmp_path / "t.db")


def test_url_is_a_server(tmp_path: Path, postgres_server: Server) -> None:
    """Describing a database creates nothing."""
    url = postgres_server.url(postgres_server.database(is_empty=True))
    before = describe_place(url, tmp_path, {})
    store = open_store(url, tmp_path, {})
    tenants = store.query("select * from tenants")
    store.close()

    assert before.endswith("filled at the first start")
    assert isinstance(store, PostgresStore)
    assert (tenants, describe_place(url, tmp_path, {})) == ([], store.place)


def test_refuses_wrong_address_before_opening() -> None:
    """When the settings are read."""
    check_place("trunkline.db")
    with pytest.raises(StoreError, match="no password"):
        check_place("postgresql://ada:secret@h/books")


def test_missing_driver_names_the_extra_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver is optional."""
    usual = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "tenancy.storage.postgres":
            raise ImportError(name)
        return usual(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)

    with pytest.raises(StoreError, match=r"trunkline\[postgres\]"):
        open_store("postgresql:///books", tmp_path, {})
