"""A payer that has asked for nothing for an hour gives its blocks sooner, and its floor never."""

from __future__ import annotations

from engine.api import LeaseRequest, Quota, Retention
from engine.cache import PrefixCache
from engine.cache.tree.fair_share import RESTING_AFTER_S
from tests.unit.engine.cache.sequences import computed

BLOCKS, SIZE = 100, 2


def ask(
    cache: PrefixCache, quota: Quota, number: int, blocks: int, now_s: float, promise_s: float = 0
) -> int:
    """Run a request of `blocks` blocks of its own; return the tokens that it found."""
    tokens = [number * 1000 + index for index in range(blocks * SIZE)]
    kept = Retention("kept", promise_s=promise_s)
    leases = (LeaseRequest(len(tokens), kept),) if promise_s else ()
    table = computed(cache, tokens, now_s, quota.payer, quota=quota, leases=leases)
    found = cache.peek(quota.payer, tokens, now_s).cached_tokens
    cache.release(table, tokens, now_s)
    cache.check()
    return found


def held(cache: PrefixCache, quota: Quota) -> int:
    return cache.use(quota.payer).blocks


def both(floor: int = 0, promise_s: float = 0) -> tuple[PrefixCache, Quota, Quota]:
    """Return a pool of which each of two payers holds half, and their quotas."""
    cache = PrefixCache(blocks=BLOCKS, block_size=SIZE)
    quiet, busy = Quota(payer=b"quiet", floor_blocks=floor), Quota(payer=b"busy")
    ask(cache, quiet, 0, 50, 0.0, promise_s)
    ask(cache, busy, 1, 50, 0.0)
    return cache, quiet, busy


def test_a_payer_keeps_its_share_while_it_asks() -> None:
    """Within the hour both weigh alike, so who wants more gives its own."""
    cache, quiet, busy = both()

    ask(cache, busy, 2, 30, RESTING_AFTER_S - 1)

    assert held(cache, quiet) >= 49


def test_a_payer_that_rests_holds_a_quarter_as_much() -> None:
    """What nobody has asked for during an hour is found less often than what is asked for now."""
    cache, quiet, busy = both()

    for number in range(2, 6):
        ask(cache, busy, number, 30, RESTING_AFTER_S + number)

    assert 18 <= held(cache, quiet) <= 22
    assert held(cache, busy) == BLOCKS - held(cache, quiet)


def test_a_payer_that_comes_back_has_its_whole_weight_at_once() -> None:
    """Its next request takes its share from those that took it."""
    cache, quiet, busy = both()
    for number in range(2, 6):
        ask(cache, busy, number, 30, RESTING_AFTER_S + number)

    for number in range(10, 14):
        ask(cache, quiet, number, 30, RESTING_AFTER_S + number)

    assert 48 <= held(cache, quiet) <= 52


def test_a_floor_is_not_touched_by_rest() -> None:
    """What an operator has guaranteed does not depend on when it was last asked for."""
    cache, quiet, busy = both(floor=45)

    for number in range(2, 8):
        ask(cache, busy, number, 30, 10 * RESTING_AFTER_S + number)

    assert held(cache, quiet) >= 45


def test_a_promise_is_not_touched_by_rest() -> None:
    """A lease of a day keeps its blocks through a night without a request."""
    cache, quiet, busy = both(promise_s=86_400.0)

    for number in range(2, 8):
        ask(cache, busy, number, 30, 10 * RESTING_AFTER_S + number)

    assert held(cache, quiet) == 50


def test_a_payer_that_runs_something_does_not_rest() -> None:
    """An answer that takes longer than an hour is a use for all of its time."""
    cache, quiet, busy = both()
    tokens = [9000, 9001]
    table = computed(cache, tokens, 0.0, quiet.payer, quota=quiet)

    for number in range(2, 6):
        ask(cache, busy, number, 30, RESTING_AFTER_S + number)

    assert held(cache, quiet) >= 48
    cache.release(table, tokens, RESTING_AFTER_S + 9)
