"""Who is asking, where a thread looks for what has changed; `test_registry` has the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant, set_status
from tenancy.errors import KeyRefused, StoreError
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall

PATIENCE_S = 20.0


@pytest.fixture
def registry(store: Store, wall: Wall) -> Iterator[KeyAuthenticator]:
    registry = KeyAuthenticator(store, wall, lambda: 0.0)
    registry.watch()
    yield registry
    registry.close()
    registry.close()


def seen(registry: KeyAuthenticator, key: str) -> str:
    """What becomes of a key, as soon as the thread has looked."""
    registry.look_again()
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        try:
            return registry.authenticate(key).tenant.status
        except KeyRefused as refusal:
            if refusal.code != "key_unknown":
                return refusal.code
        pause.wait(0.01)
    raise AssertionError("never seen")


def test_what_changes_is_seen_without_asking_the_database(
    store: Store, wall: Wall, registry: KeyAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever authenticates is on an event loop; a server is a round trip away."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    first = seen(registry, key)
    main = threading.current_thread()
    query = store.query

    def guarded(*args: object) -> object:
        assert threading.current_thread() is not main, "asked by whoever authenticates"
        return query(*args)  # type: ignore[arg-type]

    set_status(store, "ada", "suspended")
    monkeypatch.setattr(store, "query", guarded)
    registry.look_again()
    pause, answers = threading.Event(), set[str]()
    while "tenant_suspended" not in answers:
        pause.wait(0.01)
        answers.add(seen(registry, key))

    assert first == "active"


def test_while_the_database_is_away_the_thread_lives(
    store: Store, wall: Wall, registry: KeyAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read last stands, and what came meanwhile is seen afterwards."""
    asked = threading.Event()

    def away() -> int:
        asked.set()
        raise StoreError("unusable", "test")

    with monkeypatch.context() as patch:
        patch.setattr(store, "registry_version", away)
        registry.look_again()
        assert asked.wait(PATIENCE_S)
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)

    assert seen(registry, key) == "active"
