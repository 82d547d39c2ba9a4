"""API keys in the places where SDKs put them, and the wrong-key counter."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request

from gateway.errors import Refusal
from gateway.http.authentication import WRONG_KEYS_PER_MINUTE_MAX, WrongKeys, bearer_key
from tenancy.errors import KeyRefused
from tests.fakes import FakeClock


def key_of(headers: dict[str, str], path: str = "/") -> str:
    return bearer_key(make_mocked_request("POST", path, headers=headers))


@pytest.mark.parametrize(
    ("headers", "path"),
    [
        ({"Authorization": "Bearer k"}, "/"),
        ({"authorization": "bearer  k "}, "/"),
        ({"X-Api-Key": "k"}, "/"),
        ({"x-goog-api-key": "k"}, "/"),
        ({}, "/v1/models?key=k"),
        ({"Authorization": "Bearer k", "X-Api-Key": "k", "x-goog-api-key": "k"}, "/?key=k"),
    ],
)
def test_key_is_found_in_every_place_that_sdks_use(headers: dict[str, str], path: str) -> None:
    """Three SDKs use four places; the same key twice counts as one key."""
    assert key_of(headers, path) == "k"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer a", "X-Api-Key": "b"},
        {"X-Api-Key": "a", "x-goog-api-key": "b"},
        {"Authorization": "Basic a", "X-Api-Key": "b"},
    ],
)
def test_two_different_keys_are_refused(headers: dict[str, str]) -> None:
    """Checking one key and billing the other would charge the wrong tenant."""
    with pytest.raises(Refusal, match="Two different keys"):
        key_of(headers)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "k"}])
def test_missing_key_is_refused(headers: dict[str, str]) -> None:
    """The message names the expected header."""
    with pytest.raises(KeyRefused, match="Authorization: Bearer"):
        key_of(headers)


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
