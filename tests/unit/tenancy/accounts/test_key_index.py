"""Finding who a key is: by the whole of its digest, in the same time, in the line it belongs to."""

from __future__ import annotations

import secrets

import pytest
from msgspec.structs import replace

from tenancy.accounts.key_index import KeyIndex, load_keys
from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import KeyRefused
from tenancy.storage.interface import Store
from tests.unit.tenancy.conftest import Wall


def test_an_unknown_key_is_compared_like_a_known_one(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T15: time must not tell which keys exist. One digest, one comparison of 32 bytes, always."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    ring = KeyIndex(load_keys(store))
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return secrets.compare_digest(a, b)

    monkeypatch.setattr("tenancy.accounts.key_index.hmac.compare_digest", compare)
    ring.find(key, wall())
    for wrong in (key[:-1], "", "x" * 5_000):
        with pytest.raises(KeyRefused):
            ring.find(wrong, wall())

    assert compared == [(32, 32)] * 4


def test_a_digest_that_begins_like_another_is_another(store: Store, wall: Wall) -> None:
    """Declared digests come from whoever made the key, who may choose how they begin: neither its
    coming nor its going must take away another's key."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    (facts,) = load_keys(store)
    near = replace(facts, digest=facts.digest[:-1] + bytes([facts.digest[-1] ^ 1]), key_id=2)
    ring = KeyIndex([facts, near])
    found = ring.find(key, wall())
    ring.replace([2], [])

    assert found.key_id == ring.find(key, wall()).key_id == 1
    assert len(ring) == 1


def test_keys_that_were_rotated_are_one_line(store: Store, wall: Wall) -> None:
    """Named by its first; another key is another line."""
    tenant_id = create_tenant(store, wall, "ada").tenant_id
    keys = [create_key(store, wall, tenant_id) for _ in range(2)]
    keys.append(rotate_key(store, wall, "1", 9)[0])
    keys.append(rotate_key(store, wall, "3", 9)[0])
    ring = KeyIndex(load_keys(store))

    assert [ring.find(key, wall()).line_id for key in keys] == [1, 2, 1, 1]
