"""Each owner finds only its own entries, and keeps them beside an owner that fills the cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.owner_cache import OWNERS_MAX, OwnerCache


def test_an_owner_never_finds_another_owners_entry() -> None:
    cache: OwnerCache[str, str] = OwnerCache(100)
    cache.put(1, "key", "first", 1)

    assert cache.get(2, "key") is None
    cache.put(2, "key", "second", 1)
    assert (cache.get(1, "key"), cache.get(2, "key")) == ("first", "second")


def test_a_full_cache_takes_room_from_its_largest_owner() -> None:
    """A flood of one tenant leaves the pieces of the others."""
    cache: OwnerCache[int, int] = OwnerCache(100)
    for key in range(10):
        cache.put(1, key, key, 1)
    for key in range(1_000):
        cache.put(2, key, key, 10)

    assert [cache.get(1, key) for key in range(10)] == list(range(10))
    assert cache.get(2, 999) == 999
    assert cache.size <= 100


def test_the_least_recently_used_entry_goes_first() -> None:
    cache: OwnerCache[str, int] = OwnerCache(80)
    for key in "abcdefgh":
        cache.put(1, key, 1, 10)
    cache.get(1, "a")
    cache.put(1, "i", 1, 10)

    assert (cache.get(1, "a"), cache.get(1, "b")) == (1, None)


def test_a_large_entry_is_not_kept() -> None:
    """It would push out many others."""
    cache: OwnerCache[str, int] = OwnerCache(80)
    cache.put(1, "small", 1, 10)
    cache.put(1, "large", 1, 11)

    assert (cache.get(1, "small"), cache.get(1, "large")) == (1, None)


def test_the_number_of_owners_is_bounded() -> None:
    """The owner that was idle longest is dropped."""
    cache: OwnerCache[str, int] = OwnerCache(10 * OWNERS_MAX)
    for owner in range(OWNERS_MAX):
        cache.put(owner, "key", 1, 1)
    cache.get(0, "key")
    cache.put(OWNERS_MAX, "key", 1, 1)

    assert (cache.get(0, "key"), cache.get(1, "key")) == (1, None)
    assert cache.size == OWNERS_MAX


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 6), st.booleans()),
        max_size=60,
    )
)
def test_the_size_is_the_sum_of_the_entries(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    """The first value of a key stays until it is pushed out; the size stays within its bound."""
    cache: OwnerCache[int, tuple[int, int, int]] = OwnerCache(40)
    for owner, key, size, is_put in steps:
        if is_put:
            cache.put(owner, key, (owner, key, size), size)
        found = cache.get(owner, key)
        assert found is None or found[:2] == (owner, key)

        held = [cache.get(one, other) for one in range(4) for other in range(6)]
        assert cache.size == sum(entry[2] for entry in held if entry is not None) <= 40
