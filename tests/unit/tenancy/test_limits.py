"""Rate limits and concurrency limits: admissions, refusals and waiting times."""

from __future__ import annotations

from math import ceil

import pytest

from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.errors import LimitExceeded
from tenancy.limits import NO_DEMAND, Demand, LimitState
from tenancy.storage.interface import Store
from tenancy.types import Limits
from tests.actors import TESTER
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.limits_driver import FREE, SMALL, Desk, identity


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- requests ------------------------------------------------------------------------------------


def test_refusal_names_limit_remaining_and_retry_time(desk: Desk) -> None:
    """Clients act on these fields, and people read them."""
    limits = Limits(requests_per_minute=10)
    desk.given(10, limits)
    desk.clock.ms += 2_000
    refusal = desk.ask(limits)

    assert refusal is not None
    assert refusal.code == "requests_per_minute"
    assert (refusal.limit, refusal.remaining) == (10, 0)
    assert (refusal.retry_after_s, refusal.reset_s) == (4.0, 58.0)
    assert "10 requests per minute" in refusal.message


def test_retry_after_the_given_wait_is_admitted(desk: Desk) -> None:
    """A retry one millisecond earlier is not."""
    limits = Limits(tokens_per_minute=600)
    desk.ask(limits, Demand(500, 100))
    first = desk.ask(limits, Demand(30, 12))
    desk.clock.ms += 4_199
    early = desk.ask(limits, Demand(30, 12))
    desk.clock.ms += 1
    on_time = desk.ask(limits, Demand(30, 12))

    assert first is not None
    assert early is not None
    assert (first.retry_after_s, on_time) == (4.2, None)


def test_many_refused_clients_get_different_turns(desk: Desk) -> None:
    """If a hundred clients were given the same second, all but one would be refused again."""
    limits = Limits(requests_per_minute=100)
    desk.given(100, limits)
    times: list[float] = []
    for _ in range(100):
        refusal = desk.ask(limits)
        assert refusal is not None
        assert refusal.retry_after_s is not None
        times.append(refusal.retry_after_s)
    start_ms = desk.clock.ms
    served = 0
    for wait_s in sorted(times):
        desk.clock.ms = start_ms + 1_000 * ceil(wait_s)
        served += desk.ask(limits) is None

    assert served == 100
    assert max(times) <= 60


# --- tokens --------------------------------------------------------------------------------------


def test_underestimate_becomes_debt(desk: Desk) -> None:
    """Tokens that the cache lost after admission were computed all the same."""
    limits = Limits(tokens_per_minute=60)
    desk.ask(limits, Demand(10, 0))
    desk.settle(Demand(90, 0))
    desk.clock.ms += 30_000
    owing = desk.ask(limits, Demand(1, 0))
    desk.clock.ms += 1_000

    assert owing is not None
    assert (owing.remaining, owing.retry_after_s, owing.reset_s) == (0, 1.0, 60.0)
    assert desk.ask(limits, Demand(1, 0)) is None


def test_correction_frees_cached_tokens_once(desk: Desk) -> None:
    """Cached tokens are free for other requests before the end, and only once."""
    limits = Limits(input_tokens_per_minute=1_000, requests_at_once=2)
    desk.ask(limits, Demand(900, 10))
    refused = desk.ask(limits, Demand(500, 10))
    desk.open[0].correct(Demand(100, 10))
    left = desk.limiter.status(identity(limits))["input_tokens"].remaining
    desk.settle(Demand(100, 3))

    assert refused is not None
    assert left == 900
    assert desk.limiter.status(identity(limits))["input_tokens"].remaining == 900
    assert desk.limiter.running_of(1) == 0


def test_limit_is_near_above_an_eighth(desk: Desk) -> None:
    """Only then does it matter how much is cached; a refilled limit is not near any more."""
    limits = Limits(tokens_per_minute=800, requests_per_minute=9, output_tokens_per_minute=1)
    desk.ask(limits, NO_DEMAND)
    place = desk.open[0]
    first = [place.is_near_limit(Demand(count, 0)) for count in (100, 101)]
    desk.ask(limits, Demand(60, 0))
    then = [place.is_near_limit(Demand(count, 0)) for count in (40, 41)]
    desk.clock.ms += 1_500
    later = [place.is_near_limit(Demand(count, 0)) for count in (60, 61)]
    desk.ask(FREE, NO_DEMAND, tenant_id=2, key_id=2)

    assert (first, then, later) == ([False, True], [False, True], [False, True])
    assert not desk.open[-1].is_near_limit(Demand(10**12, 10**12))


def test_refused_extension_takes_nothing_and_keeps_the_place(desk: Desk) -> None:
    """The request stays counted, since it was prepared; its tokens are free for others."""
    limits = Limits(requests_per_minute=5, tokens_per_minute=100, requests_at_once=2)
    desk.ask(limits, Demand(70, 0))
    desk.ask(limits, NO_DEMAND)
    with pytest.raises(LimitExceeded) as refused:
        desk.open[1].extend(Demand(40, 0))
    left = desk.limiter.status(identity(limits))

    assert refused.value.code == "tokens_per_minute"
    assert refused.value.retry_after_s == pytest.approx(6.0)
    assert (left["requests"].remaining, left["tokens"].remaining) == (3, 30)
    assert desk.limiter.running_of(1) == 2


def test_refused_extension_waits_for_a_further_request_too(desk: Desk) -> None:
    """The retry draws another request: it is not told to come when it would be refused again."""
    limits = Limits(requests_per_minute=1, tokens_per_minute=6_000)
    desk.ask(limits, NO_DEMAND)
    with pytest.raises(LimitExceeded) as never:
        desk.open[0].extend(Demand(6_001, 0))
    desk.open[0].extend(Demand(5_950, 0))
    desk.settle(Demand(5_950, 0))
    desk.clock.ms += 60_000
    desk.ask(limits, NO_DEMAND)
    desk.open[0].extend(Demand(5_900, 0))
    desk.settle(Demand(6_100, 0))  # a debt of a second
    desk.clock.ms += 60_000
    desk.ask(limits, NO_DEMAND)
    with pytest.raises(LimitExceeded) as later:
        desk.open[0].extend(Demand(6_000, 0))

    assert (never.value.code, never.value.retry_after_s) == ("request_exceeds_limit", None)
    assert (later.value.code, later.value.retry_after_s) == ("requests_per_minute", 60.0)


def test_extension_waits_for_no_debt_of_other_tokens(desk: Desk) -> None:
    """More output is refused by a limit of output alone: a request that has its input goes on."""
    limits = Limits(input_tokens_per_minute=100, output_tokens_per_minute=100)
    desk.ask(limits, Demand(50, 0))
    desk.ask(limits, Demand(50, 0))
    desk.settle(Demand(90, 0))

    assert desk.limiter.status(identity(limits))["input_tokens"].reset_s == 84.0
    assert desk.extend(Demand(50, 10))
    assert not desk.extend(Demand(51, 10))


def test_reservation_status_equals_limiter_status(desk: Desk) -> None:
    """Headers use it without counting again."""
    tenant, key = Limits(requests_per_minute=9, tokens_per_minute=90), Limits(requests_per_minute=7)
    desk.ask(tenant, Demand(20, 3), key_limits=key)
    desk.clock.ms += 700
    desk.ask(tenant, Demand(7, 3), key_limits=key)

    assert desk.open[1].status() == desk.limiter.status(identity(tenant, key))


def test_settling_twice_changes_nothing(desk: Desk) -> None:
    """A cancelled request passes two places that settle."""
    limits = Limits(tokens_per_minute=100, requests_at_once=1)
    desk.ask(limits, Demand(50, 50))
    reservation = desk.open[0]
    reservation.settle(Demand(50, 0))
    reservation.settle(Demand(0, 0))

    assert desk.limiter.running_of(1) == 0
    assert desk.limiter.status(identity(limits))["tokens"].remaining == 50
    assert not reservation.is_open


def test_request_above_the_limit_gets_no_retry_time(desk: Desk) -> None:
    """A client that obeyed it would retry forever."""
    refusal = desk.ask(Limits(tokens_per_minute=100), Demand(60, 41))

    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("request_exceeds_limit", None)
    assert "101 tokens" in refusal.message


# --- concurrency---------------------------------------------------------------------------------


def test_concurrency_limit_frees_when_a_request_ends(desk: Desk) -> None:
    """Waiting a minute does not help; an ended request does."""
    limits = Limits(requests_at_once=2)
    given = desk.given(5, limits)
    desk.clock.ms += 600_000
    still = desk.ask(limits)
    desk.settle(Demand(1, 1))

    assert given == 2
    assert still is not None
    assert (still.code, still.retry_after_s) == ("requests_at_once", 1.0)
    assert desk.given(5, limits) == 1


# --- tenants and keys ----------------------------------------------------------------------------


def test_keys_limit_applies_to_that_key_only(desk: Desk) -> None:
    """A refusal by the key's limit takes nothing from the tenant's."""
    tenant, key = Limits(requests_per_minute=4), Limits(requests_per_minute=1)
    one = desk.given(9, tenant, key_limits=key, key_id=1)
    two = desk.given(9, tenant, key_id=2)

    assert (one, two) == (1, 3)


def test_rotated_keys_share_their_limits(desk: Desk, store: Store, wall: Wall) -> None:
    """During the grace both keys count as one; another key of the tenant has its own limit."""
    ada = create_tenant(store, wall, "ada").tenant_id
    limits = Limits(requests_per_minute=4, requests_at_once=3)
    old, other = (create_key(store, wall, ada, limits=limits) for _ in range(2))
    new, _, _ = rotate_key(store, wall, "1", 9, by=TESTER)
    registry = KeyAuthenticator(store, wall, desk.clock)

    def given(key: str, count: int) -> int:
        who = registry.authenticate(key)
        return desk.given(
            count,
            who.limits,
            key_limits=who.key_limits,
            key_id=who.key_id,
            line_id=who.line_id,
        )

    at_once = [given(old, 2), given(new, 2)]
    for _ in range(3):
        desk.settle(SMALL)

    assert at_once == [2, 1]
    assert [given(new, 2), given(old, 2), given(other, 9)] == [1, 0, 3]


def test_keys_of_one_line_may_have_different_limits(desk: Desk) -> None:
    """The successor has half the limit; what the old key used counts in proportion."""
    whole, half = Limits(tokens_per_minute=1_000), Limits(tokens_per_minute=500)
    desk.ask(FREE, Demand(500, 0), key_limits=whole, key_id=1)
    too_much = desk.ask(FREE, Demand(251, 0), key_limits=half, key_id=2, line_id=1)

    assert too_much is not None
    assert desk.ask(FREE, Demand(250, 0), key_limits=half, key_id=2, line_id=1) is None


def test_tenants_do_not_share_limits(desk: Desk) -> None:
    limits = Limits(requests_per_minute=2)
    desk.given(9, limits, tenant_id=1, key_id=1)

    assert desk.given(9, limits, tenant_id=2, key_id=2) == 2


def test_refusal_names_the_limit_with_the_longest_wait(desk: Desk) -> None:
    """A retry after the shorter wait would be refused a second time."""
    limits = Limits(output_tokens_per_minute=120, tokens_per_minute=180)
    desk.ask(limits, Demand(60, 120))
    refusal = desk.ask(limits, Demand(60, 30))

    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("tokens_per_minute", 30.0)


# --- changes and memory --------------------------------------------------------------------------


def test_changed_limit_keeps_the_used_share(desk: Desk) -> None:
    """Half used stays half used."""
    desk.given(5, Limits(requests_per_minute=10))
    left = desk.limiter.status(identity(Limits(requests_per_minute=100)))["requests"].remaining

    assert left == 50
    assert desk.given(99, Limits(requests_per_minute=2)) == 1


def test_new_limit_starts_full(desk: Desk) -> None:
    """Earlier requests do not count."""
    desk.given(50, FREE)

    assert desk.given(9, Limits(requests_per_minute=3)) == 3


def test_settlement_uses_the_limit_of_the_reservation(desk: Desk) -> None:
    """After a lowered limit, settlement would otherwise return more than was taken."""
    desk.ask(Limits(tokens_per_minute=1_000), Demand(500, 0))
    desk.ask(Limits(tokens_per_minute=1_000), Demand(500, 0))
    desk.open[0].settle(Demand(0, 0))
    left = desk.limiter.status(identity(Limits(tokens_per_minute=10)))["tokens"].remaining

    assert left == 5


def test_status_is_the_tighter_of_tenant_and_key(desk: Desk) -> None:
    """A header must not promise what the other limit refuses."""
    tenant = Limits(requests_per_minute=10, tokens_per_minute=6_000)
    key = Limits(requests_per_minute=6)
    desk.given(2, tenant, Demand(10, 10), key_limits=key)

    assert desk.limiter.status(identity(tenant, key)) == {
        "requests": LimitState(6, 4, 20.0),
        "tokens": LimitState(6_000, 5_960, 0.4),
    }


def test_status_changes_nothing(desk: Desk) -> None:
    """It does not add to memory either."""
    desk.limiter.status(identity(Limits(requests_per_minute=10)))

    assert len(desk.limiter) == 0


def test_idle_accounts_are_dropped(desk: Desk) -> None:
    """A million keys seen once must not stay in memory."""
    limits = Limits(requests_per_minute=1)
    for number in range(1, 1_501):
        desk.clock.ms += 100
        desk.ask(limits, key_id=number, tenant_id=number)
        desk.settle(SMALL)

    assert len(desk.limiter) < 2 * 610
    assert desk.ask(limits, tenant_id=1_499, key_id=1_499) is not None


def test_running_accounts_are_kept(desk: Desk) -> None:
    """An hour-long request still counts as running."""
    limits = Limits(requests_at_once=1)
    desk.ask(limits)
    desk.clock.ms += 3_600_000
    for number in range(100):
        desk.ask(FREE, tenant_id=number + 10, key_id=number + 10)

    assert desk.ask(limits) is not None
