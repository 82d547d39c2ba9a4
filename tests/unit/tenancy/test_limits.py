"""Limits per minute and at once: what is given, what is refused and for how long."""

from __future__ import annotations

from math import ceil

import pytest

from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.keys import create_key, rotate_key
from tenancy.accounts.tenants import create_tenant
from tenancy.limits import Demand, LimitState
from tenancy.storage.interface import Store
from tenancy.types import Limits
from tests.unit.tenancy.conftest import Wall
from tests.unit.tenancy.limits_driver import FREE, SMALL, Desk, identity


@pytest.fixture
def desk() -> Desk:
    return Desk()


# --- requests ------------------------------------------------------------------------------------


def test_a_minutes_requests_may_come_at_once_and_no_more(desk: Desk) -> None:
    """However many ask in the same instant."""
    assert desk.given(1_000, Limits(requests_per_minute=10)) == 10


def test_without_limits_everything_is_given(desk: Desk) -> None:
    """Nothing is limited that nobody limited."""
    assert desk.given(1_000, FREE, Demand(10**12, 10**12)) == 1_000


def test_a_limit_refills_evenly(desk: Desk) -> None:
    """No stampede at the turn of a minute: ten a minute is one every six seconds."""
    limits = Limits(requests_per_minute=10)
    desk.given(10, limits)
    desk.clock.ms += 5_999
    before = desk.given(5, limits)
    desk.clock.ms += 1
    after = desk.given(5, limits)
    desk.clock.ms += 12_000

    assert (before, after, desk.given(5, limits)) == (0, 1, 2)


def test_a_refusal_says_what_when_and_how_much(desk: Desk) -> None:
    """A client acts on these, and a person reads them."""
    limits = Limits(requests_per_minute=10)
    desk.given(10, limits)
    desk.clock.ms += 2_000
    refusal = desk.ask(limits)

    assert refusal is not None
    assert refusal.code == "requests_per_minute"
    assert (refusal.limit, refusal.remaining) == (10, 0)
    assert (refusal.retry_after_s, refusal.reset_s) == (4.0, 58.0)
    assert "10 requests per minute" in refusal.message


def test_who_waits_as_long_as_told_is_given(desk: Desk) -> None:
    """And a millisecond earlier is not."""
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


def test_a_crowd_that_waits_as_told_is_served(desk: Desk) -> None:
    """A hundred clients told the same second would be refused again, all but one."""
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


def test_what_was_estimated_too_high_is_given_back_at_once(desk: Desk) -> None:
    """Most answers are shorter than they may be."""
    limits = Limits(tokens_per_minute=1_000)
    desk.ask(limits, Demand(100, 900))
    refused = desk.ask(limits, Demand(100, 700))
    desk.settle(Demand(100, 100))

    assert refused is not None
    assert desk.ask(limits, Demand(100, 700)) is None
    assert desk.ask(limits, Demand(1, 0)) is not None


def test_what_was_estimated_too_low_is_owed(desk: Desk) -> None:
    """What the cache lost between the look and the start was computed all the same."""
    limits = Limits(tokens_per_minute=60)
    desk.ask(limits, Demand(10, 0))
    desk.settle(Demand(90, 0))
    desk.clock.ms += 30_000
    owing = desk.ask(limits, Demand(1, 0))
    desk.clock.ms += 1_000

    assert owing is not None
    assert (owing.remaining, owing.retry_after_s, owing.reset_s) == (0, 1.0, 60.0)
    assert desk.ask(limits, Demand(1, 0)) is None


def test_what_is_known_while_it_runs_is_given_back_at_once(desk: Desk) -> None:
    """What the cache had is there for others before the answer has ended, and only once."""
    limits = Limits(input_tokens_per_minute=1_000, requests_at_once=2)
    desk.ask(limits, Demand(900, 10))
    refused = desk.ask(limits, Demand(500, 10))
    desk.open[0].correct(Demand(100, 10))
    left = desk.limiter.status(identity(limits))["input_tokens"].remaining
    desk.settle(Demand(100, 3))

    assert refused is not None
    assert left == 900
    assert desk.limiter.status(identity(limits))["input_tokens"].remaining == 900
    assert desk.limiter.open_reservations == 0


def test_a_limit_presses_when_more_than_an_eighth_of_it_is_taken(desk: Desk) -> None:
    """Only then it matters what the cache has; what refills with time presses no more."""
    who = identity(Limits(tokens_per_minute=800, requests_per_minute=2, output_tokens_per_minute=1))
    first = [desk.limiter.presses(who, Demand(count, 0)) for count in (100, 101)]
    desk.ask(who.limits, Demand(60, 0))
    then = [desk.limiter.presses(who, Demand(count, 0)) for count in (40, 41)]
    desk.clock.ms += 1_500
    later = [desk.limiter.presses(who, Demand(count, 0)) for count in (60, 61)]

    assert (first, then, later) == ([False, True], [False, True], [False, True])
    assert not desk.limiter.presses(identity(FREE), Demand(10**12, 10**12))


def test_the_status_of_a_reservation_is_the_limiters(desk: Desk) -> None:
    """Headers are made of it, without counting again."""
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

    assert desk.limiter.open_reservations == 0
    assert desk.limiter.status(identity(limits))["tokens"].remaining == 50
    assert not reservation.is_open


def test_input_and_output_have_limits_of_their_own(desk: Desk) -> None:
    """What the cache has costs no input; an answer costs the same whatever was read."""
    limits = Limits(input_tokens_per_minute=100, output_tokens_per_minute=10)
    codes = [
        getattr(desk.ask(limits, demand), "code", None)
        for demand in (Demand(90, 5), Demand(20, 5), Demand(10, 6), Demand(10, 5))
    ]

    assert codes == [None, "input_tokens_per_minute", "output_tokens_per_minute", None]


def test_what_can_never_fit_is_not_told_to_wait(desk: Desk) -> None:
    """A client that obeys would come back for ever."""
    refusal = desk.ask(Limits(tokens_per_minute=100), Demand(60, 41))

    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("request_exceeds_limit", None)
    assert "101 tokens" in refusal.message


@pytest.mark.parametrize("limit", [7, 700_000_000, 10**12])
def test_no_rounding_makes_a_token_free(desk: Desk, limit: int) -> None:
    """Of a trillion a minute one token is less than a nanosecond's."""
    limits = Limits(tokens_per_minute=limit)
    given = desk.given(50, limits, Demand(1, 0))

    assert given == min(50, limit)
    assert desk.limiter.status(identity(limits))["tokens"].remaining <= limit - given


# --- at once -------------------------------------------------------------------------------------


def test_so_many_run_at_once_and_a_place_is_free_when_one_ends(desk: Desk) -> None:
    """A minute's rest does not help, an ended request does."""
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


def test_the_keys_of_a_tenant_share_its_limit(desk: Desk) -> None:
    """Two keys are not twice as much."""
    limits = Limits(requests_per_minute=4)

    assert desk.given(3, limits, key_id=1) + desk.given(3, limits, key_id=2) == 4


def test_a_keys_limit_holds_for_it_alone(desk: Desk) -> None:
    """And what it was refused is not taken from its tenant."""
    tenant, key = Limits(requests_per_minute=4), Limits(requests_per_minute=1)
    one = desk.given(9, tenant, key_limits=key, key_id=1)
    two = desk.given(9, tenant, key_id=2)

    assert (one, two) == (1, 3)


def test_a_key_that_is_rotated_gets_no_new_minute(desk: Desk, store: Store, wall: Wall) -> None:
    """During the grace both work, as one; another key of the tenant has its own."""
    ada = create_tenant(store, wall, "ada").tenant_id
    limits = Limits(requests_per_minute=4, requests_at_once=3)
    old, other = (create_key(store, wall, ada, limits=limits) for _ in range(2))
    new, _, _ = rotate_key(store, wall, "1", 9)
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


def test_keys_of_a_line_may_have_other_limits(desk: Desk) -> None:
    """The new one was given half: what the old one took of its own counts in proportion."""
    whole, half = Limits(tokens_per_minute=1_000), Limits(tokens_per_minute=500)
    desk.ask(FREE, Demand(500, 0), key_limits=whole, key_id=1)
    too_much = desk.ask(FREE, Demand(251, 0), key_limits=half, key_id=2, line_id=1)

    assert too_much is not None
    assert desk.ask(FREE, Demand(250, 0), key_limits=half, key_id=2, line_id=1) is None


def test_tenants_do_not_share(desk: Desk) -> None:
    """One's flood is not another's."""
    limits = Limits(requests_per_minute=2)
    desk.given(9, limits, tenant_id=1, key_id=1)

    assert desk.given(9, limits, tenant_id=2, key_id=2) == 2


def test_a_refusal_takes_nothing_from_any_limit(desk: Desk) -> None:
    """Refused for tokens, it has not used up a request."""
    limits = Limits(requests_per_minute=5, tokens_per_minute=100)
    desk.ask(limits, Demand(100, 0))
    desk.given(50, limits, Demand(50, 0))

    assert desk.limiter.status(identity(limits))["requests"].remaining == 4


def test_the_limit_that_is_longest_in_the_way_refuses(desk: Desk) -> None:
    """Who waits for the shorter one would be refused a second time."""
    limits = Limits(requests_per_minute=60, tokens_per_minute=60)
    for _ in range(60):
        desk.ask(limits, Demand(1, 0))
    refusal = desk.ask(limits, Demand(30, 0))

    assert refusal is not None
    assert (refusal.code, refusal.retry_after_s) == ("tokens_per_minute", 30.0)


# --- changes and memory --------------------------------------------------------------------------


def test_a_changed_limit_holds_for_the_next_request(desk: Desk) -> None:
    """Half of it used is half of it used, before and after."""
    desk.given(5, Limits(requests_per_minute=10))
    left = desk.limiter.status(identity(Limits(requests_per_minute=100)))["requests"].remaining

    assert left == 50
    assert desk.given(99, Limits(requests_per_minute=2)) == 1


def test_a_limit_that_came_later_starts_whole(desk: Desk) -> None:
    """What was free was free."""
    desk.given(50, FREE)

    assert desk.given(9, Limits(requests_per_minute=3)) == 3


def test_a_reservation_is_settled_at_the_limit_it_was_made_at(desk: Desk) -> None:
    """A limit that was lowered meanwhile would otherwise give back more than was taken."""
    desk.ask(Limits(tokens_per_minute=1_000), Demand(500, 0))
    desk.ask(Limits(tokens_per_minute=1_000), Demand(500, 0))
    desk.open[0].settle(Demand(0, 0))
    left = desk.limiter.status(identity(Limits(tokens_per_minute=10)))["tokens"].remaining

    assert left == 5


def test_the_state_is_the_tighter_of_tenant_and_key(desk: Desk) -> None:
    """A header that promised what the other limit refuses would be no help."""
    tenant = Limits(requests_per_minute=10, tokens_per_minute=6_000)
    key = Limits(requests_per_minute=6)
    desk.given(2, tenant, Demand(10, 10), key_limits=key)

    assert desk.limiter.status(identity(tenant, key)) == {
        "requests": LimitState(6, 4, 20.0),
        "tokens": LimitState(6_000, 5_960, 0.4),
    }


def test_looking_changes_nothing(desk: Desk) -> None:
    """Not even what is remembered."""
    desk.limiter.status(identity(Limits(requests_per_minute=10)))

    assert len(desk.limiter) == 0


def test_what_is_idle_is_forgotten(desk: Desk) -> None:
    """A million keys once seen are not a million entries for ever."""
    limits = Limits(requests_per_minute=1)
    for number in range(1, 1_501):
        desk.clock.ms += 100
        desk.ask(limits, key_id=number, tenant_id=number)
        desk.settle(SMALL)

    assert len(desk.limiter) < 2 * 610
    assert desk.ask(limits, tenant_id=1_499, key_id=1_499) is not None


def test_what_runs_is_not_forgotten(desk: Desk) -> None:
    """An hour's answer still counts as one at once."""
    limits = Limits(requests_at_once=1)
    desk.ask(limits)
    desk.clock.ms += 3_600_000
    for number in range(100):
        desk.ask(FREE, tenant_id=number + 10, key_id=number + 10)

    assert desk.ask(limits) is not None
