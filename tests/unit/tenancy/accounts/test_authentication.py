"""`KeyAuthenticator` with a watcher thread; `test_tenants` covers the rest."""

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

PATIENCE_S = 60.0


@pytest.fixture
def registry(store: Store, wall: Wall) -> Iterator[KeyAuthenticator]:
    registry = KeyAuthenticator(store, wall, lambda: 0.0)
    registry.start_watching()
    yield registry
    registry.close()
    registry.close()


def seen(registry: KeyAuthenticator, key: str) -> str:
    """Return the outcome for a key after the thread has checked."""
    registry.refresh_now()
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        try:
            return registry.authenticate(key).tenant.status
        except KeyRefused as refusal:
            if refusal.code != "key_unknown":
                return refusal.code
        pause.wait(0.01)
    raise AssertionError("never seen")


def test_thread_sees_changes_without_a_query_on_the_caller(
    store: Store, wall: Wall, registry: KeyAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Authentication runs on an event loop, and a server is a round trip away."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    first = seen(registry, key)
    main = threading.current_thread()
    query = store.query

    def guarded(*args: object) -> object:
        assert threading.current_thread() is not main, "the authenticating thread ran a query"
        return query(*args)  # type: ignore[arg-type]

    set_status(store, "ada", "suspended")
    monkeypatch.setattr(store, "query", guarded)
    registry.refresh_now()
    pause, answers = threading.Event(), set[str]()
    while "tenant_suspended" not in answers:
        pause.wait(0.01)
        answers.add(seen(registry, key))

    assert first == "active"


def test_a_new_key_is_known_once_it_was_read(
    store: Store, wall: Wall, registry: KeyAuthenticator
) -> None:
    """A caller with an unknown key waits for one round trip, not for the thread's next period."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    gone = registry.read_now()
    gone.cancel()  # by a client that has left; the thread goes on
    registry.read_now().result(PATIENCE_S)

    assert registry.authenticate(key).tenant.name == "ada"


def test_a_read_ends_without_a_database(
    store: Store, registry: KeyAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller then answers by what it knows."""

    def away() -> int:
        raise StoreError("unusable", "test")

    monkeypatch.setattr(store, "registry_version", away)

    assert registry.read_now().result(PATIENCE_S) is None


def test_thread_survives_an_unreachable_database(
    store: Store, wall: Wall, registry: KeyAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot stays in use, and later changes are seen afterwards."""
    asked = threading.Event()

    def away() -> int:
        asked.set()
        raise StoreError("unusable", "test")

    with monkeypatch.context() as patch:
        patch.setattr(store, "registry_version", away)
        registry.refresh_now()
        assert asked.wait(PATIENCE_S)
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)

    assert seen(registry, key) == "active"
