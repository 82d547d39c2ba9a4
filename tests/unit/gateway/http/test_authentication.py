"""API keys in the places where SDKs put them, and the wrong-key counter."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from gateway.errors import Refusal
from gateway.http.authentication import (
    KEYS_MAX,
    LOOKUPS_PER_MINUTE_MAX,
    LOOKUPS_PER_SECOND_MAX,
    WRONG_KEYS_PER_MINUTE_MAX,
    CheckedKeys,
    KeyLookups,
    WrongKeys,
    has_key,
    request_keys,
)
from tenancy.errors import KeyRefused
from tests.fakes import FakeClock
from tests.tables import each_row


def keys_of(headers: Mapping[str, str], path: str = "/") -> list[str]:
    return request_keys(make_mocked_request("POST", path, headers=CIMultiDict(headers)))


def owner_of(key: str) -> str:
    """Authenticate a key such as "ada.1", whose owner is "ada"."""
    if not key[-1].isdigit():
        raise KeyRefused("key_revoked" if key.startswith("old") else "key_unknown", f"No: {key}.")
    return key


def owner(key: str) -> str:
    return key.partition(".")[0]


@each_row(
    ("headers", "path"),
    [
        ({"Authorization": "Bearer k"}, "/"),
        ({"authorization": "bearer  k "}, "/"),
        ({"X-Api-Key": "k"}, "/"),
        ({"x-goog-api-key": "k"}, "/"),
        ({"api-key": "k"}, "/"),
        ({}, "/v1/models?key=k"),
        ({"Authorization": "Bearer k", "X-Api-Key": "k", "x-goog-api-key": "k"}, "/?key=k"),
        ({"Authorization": "Bearer ", "X-Api-Key": "k"}, "/"),
        ({"Authorization": "Bearer", "X-Api-Key": "k"}, "/?key="),
        ({"Authorization": "Basic dTpw", "X-Api-Key": "k", "x-goog-api-key": ""}, "/"),
    ],
)
def test_key_is_found_in_every_place_that_sdks_use(headers: dict[str, str], path: str) -> None:
    """Four SDKs use five places; the same key twice counts as one key. An empty value and a
    proxy's own login are no keys."""
    assert keys_of(headers, path) == ["k"]


def test_every_different_key_is_found() -> None:
    """Which of them is a key of this server only its database knows."""
    headers = {"Authorization": "Bearer a", "X-Api-Key": "b", "x-goog-api-key": "c"}

    assert keys_of(headers, "/?key=d") == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    "headers",
    [
        [("X-Api-Key", str(number)) for number in range(KEYS_MAX + 1)],
        [("Authorization", "Bearer a"), ("Authorization", "Bearer b")],
    ],
)
def test_too_many_keys_are_refused(headers: list[tuple[str, str]]) -> None:
    """One request would try many keys, or a proxy and the server would read different ones."""
    with pytest.raises(Refusal, match="expected one") as refused:
        keys_of(CIMultiDict(headers))

    assert refused.value.code == "ambiguous_key"


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "k"}])
def test_missing_key_is_refused(headers: dict[str, str]) -> None:
    """A proxy may name the user instead of an empty key."""
    assert not has_key(make_mocked_request("POST", "/", headers=CIMultiDict(headers)))
    with pytest.raises(KeyRefused, match="Missing API key"):
        CheckedKeys(keys_of(headers), owner_of).one(owner)


@each_row("keys", list(itertools.permutations(["ada.1", "placeholder", "old"])))
def test_valid_key_counts_in_any_place(keys: tuple[str, ...]) -> None:
    """Agents send a key that they remember beside the one that they were given."""
    checked = CheckedKeys(keys, owner_of)

    assert checked.one(owner) == "ada.1"
    assert (checked.unknown, checked.is_guess) == (["placeholder"], False)


def test_two_valid_keys_need_one_owner() -> None:
    """Checking one key and billing the other would charge the wrong tenant."""
    with pytest.raises(Refusal, match="Two different keys"):
        CheckedKeys(["ada.1", "bob.1"], owner_of).one(owner)

    checked = CheckedKeys(["ada.1", "ada.2"], owner_of)
    assert checked.one(owner) == "ada.1"
    assert checked.one(owner, lambda key: key == "ada.2") == "ada.2"


def test_refusal_names_the_key_that_was_known() -> None:
    """A revoked key says more than a placeholder beside it."""
    with pytest.raises(KeyRefused) as refused:
        CheckedKeys(["placeholder", "old"], owner_of).one(owner)

    assert refused.value.code == "key_revoked"
    assert CheckedKeys(["placeholder"], owner_of).is_guess


def test_same_wrong_key_beside_a_known_one_is_counted_once() -> None:
    """Otherwise an agent with another service's key would use up its address's limit; different
    ones are guesses all the same."""
    counts = WrongKeys(FakeClock())
    for _ in range(2 * WRONG_KEYS_PER_MINUTE_MAX):
        assert not counts.record_beside("a", "another service's")
    over = [counts.record_beside("a", str(number)) for number in range(WRONG_KEYS_PER_MINUTE_MAX)]

    assert over == [*[False] * (WRONG_KEYS_PER_MINUTE_MAX - 1), True]


def test_wrong_keys_are_counted_by_address_and_minute() -> None:
    """The next minute starts a new count, and other addresses have counts of their own."""
    clock = FakeClock()
    counts = WrongKeys(clock)
    for _ in range(WRONG_KEYS_PER_MINUTE_MAX):
        assert not counts.record("a")

    assert counts.record("a")
    assert not counts.record("b")
    clock.advance(60)
    assert not counts.record("a")


def test_address_that_was_not_seen_for_longest_is_forgotten() -> None:
    """An unbounded counter would let attackers exhaust memory."""
    counts = WrongKeys(FakeClock())
    for _ in range(WRONG_KEYS_PER_MINUTE_MAX):
        counts.record("a")
    over = []
    for others in (4_095, 4_096):
        for number in range(others):
            counts.record(f"another {number}")
        over.append(counts.record("a"))

    assert over == [True, False]


def test_one_address_looks_a_bounded_number_of_times_in_a_minute() -> None:
    """And takes no lookup of the others' afterwards."""
    clock = FakeClock()
    lookups = KeyLookups(clock)
    admitted = 0
    for _ in range(10 * LOOKUPS_PER_MINUTE_MAX):
        clock.advance(0.05)
        admitted += lookups.admit("10.0.0.1")
    other = lookups.admit("10.0.0.2")
    clock.advance(60.0)

    assert 0 < admitted <= LOOKUPS_PER_MINUTE_MAX
    assert other
    assert lookups.admit("10.0.0.1")


def test_all_addresses_together_look_a_bounded_number_of_times_in_a_second() -> None:
    """A flood from many addresses costs the database no more."""
    clock = FakeClock()
    lookups = KeyLookups(clock)
    admitted = sum(lookups.admit(f"10.0.{n // 250}.{n % 250}") for n in range(5_000))
    clock.advance(1.0)

    assert admitted == LOOKUPS_PER_SECOND_MAX
    assert lookups.admit("10.9.9.9")
