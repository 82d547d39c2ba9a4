"""The key, from wherever an SDK puts it; never two of them."""

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
def test_every_sdks_place_for_a_key_is_a_place_for_ours(headers: dict[str, str], path: str) -> None:
    """Three SDKs, four places; the same key twice is one key."""
    assert key_of(headers, path) == "k"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer a", "X-Api-Key": "b"},
        {"X-Api-Key": "a", "x-goog-api-key": "b"},
        {"Authorization": "Basic a", "X-Api-Key": "b"},
    ],
)
def test_two_different_keys_are_nobodys(headers: dict[str, str]) -> None:
    """Whoever checks one and bills the other has been fooled."""
    with pytest.raises(Refusal, match="Two different keys"):
        key_of(headers)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer "}, {"Authorization": "k"}])
def test_no_key_is_refused(headers: dict[str, str]) -> None:
    """And says where one belongs."""
    with pytest.raises(KeyRefused, match="Authorization: Bearer"):
        key_of(headers)


def test_wrong_keys_are_counted_by_address_and_minute() -> None:
    """Guessing stops; the next minute counts anew, and other addresses are not held to it."""
    clock = FakeClock()
    counts = WrongKeys(clock)
    for _ in range(WRONG_KEYS_PER_MINUTE_MAX):
        assert not counts.is_too_many("a")

    assert counts.is_too_many("a")
    assert not counts.is_too_many("b")
    clock.advance(60)
    assert not counts.is_too_many("a")
