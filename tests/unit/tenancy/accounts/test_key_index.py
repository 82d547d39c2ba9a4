"""`KeyIndex`: lookup by the whole digest, in constant time, with lines of rotated keys."""

from __future__ import annotations

import secrets

import pytest
from msgspec.structs import replace

from tenancy.accounts.key_index import KeyIndex, load_keys
from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import KeyRefused
from tenancy.storage.interface import Store
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall


def test_unknown_key_takes_the_same_comparison(
    store: Store, wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T15: time must not reveal which keys exist. One digest, one comparison of 32 bytes,
    always."""
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


def test_digests_with_a_common_beginning_are_distinct(store: Store, wall: Wall) -> None:
    """The maker of a declared key may choose how its digest begins; adding or removing such a key
    must not affect another one."""
    key = create_key(store, wall, create_tenant(store, wall, "ada").tenant_id)
    (facts,) = load_keys(store)
    near = replace(facts, digest=facts.digest[:-1] + bytes([facts.digest[-1] ^ 1]), key_id=2)
    ring = KeyIndex([facts, near])
    found = ring.find(key, wall())
    ring.replace([2], [])

    assert found.key_id == ring.find(key, wall()).key_id == 1
    assert len(ring) == 1


def test_rotated_keys_share_a_line(store: Store, wall: Wall) -> None:
    """Named by its first key; an unrelated key has its own line."""
    tenant_id = create_tenant(store, wall, "ada").tenant_id
    keys = [create_key(store, wall, tenant_id) for _ in range(2)]
    keys.append(rotate_key(store, wall, "1", 9, by=TESTER)[0])
    keys.append(rotate_key(store, wall, "3", 9, by=TESTER)[0])
    ring = KeyIndex(load_keys(store))

    assert [ring.find(key, wall()).line_id for key in keys] == [1, 2, 1, 1]
