"""Caching contracts: reads and writes by the rules, whatever the engine physically had.

`World` stands in for the engine: prefixes that were computed are there until they are taken away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import LeaseGrant, Retention, Usage
from gateway.caching import CacheScope, Contract, ContractManager
from gateway.dialects.canonical import (
    Boundary,
    CacheDirectives,
    Call,
    GenerationParameters,
    Prompt,
    Rendered,
    UsageRecord,
)
from gateway.errors import Refusal
from gateway.retention_classes import CacheProfile, CachingConfig
from tests.fakes import FakeClock

SCOPE = CacheScope(b"ns", 1, "1/default")
ANTHROPIC = CacheDirectives(profile="anthropic")
Outcome = Literal["granted", "clipped", "refused"]


class World:
    """One engine and the manager beside it."""

    def __init__(self, config: CachingConfig | None = None, *, has_past: bool = False) -> None:
        self.clock = FakeClock()
        self.epoch = "first"
        self.losses: dict[str, int] = {}
        self.there: list[tuple[int, ...]] = []
        self.manager = ContractManager(
            config or CachingConfig(),
            self.clock,
            lambda _: self.losses,
            lambda: self.epoch,
            has_past=has_past,
        )

    def resolve(
        self, words: str, marks: dict[int, str], ask: CacheDirectives = ANTHROPIC, **more: Any
    ) -> Contract:
        """A letter is a block of ten tokens; `marks`: retention by block number."""
        boundaries = [
            Boundary(10 * n, f"m[{n}]", marks.get(n), ends_message=True)
            for n in range(1, len(words) + 1)
        ]
        call = Call("m", (Prompt(),), GenerationParameters(), cache=ask)
        self.tokens = tuple(ord(word) for word in words for _ in range(10))
        rendered = Rendered(self.tokens, tuple(boundaries))
        return self.manager.resolve(call, rendered, more.pop("scope", SCOPE), **more)

    def physical(self) -> int:
        """The longest there is, one token less than all."""
        longest = max((_common(self.tokens, one) for one in self.there), default=0)
        return min(longest, len(self.tokens) - 1)

    def run(
        self,
        words: str,
        marks: dict[int, str],
        ask: CacheDirectives = ANTHROPIC,
        grants: Sequence[LeaseGrant] | None = None,
        **more: Any,
    ) -> UsageRecord:
        """From resolving to the bill."""
        contract = self.resolve(words, marks, ask, **more)
        found = self.physical()
        if grants is None:
            grants = [
                LeaseGrant(lease.lease_id, lease.retention.name, "granted", lease.tokens)
                for lease in contract.leases
            ]
        contract.begin(found, grants)
        contract.written()
        contract.finish("id")
        self.there.append(self.tokens)
        self.last = contract
        return contract.record(Usage(len(self.tokens), found, len(self.tokens) - found, 5))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_the_second_of_two_equal_calls_reads_what_the_first_wrote() -> None:
    """The contract in one line."""
    world = World()

    first = world.run("abc", {2: "5m"})
    second = world.run("abc", {2: "5m"})

    assert (first.read, first.write, first.fresh) == ({}, {"5m": 20}, 10)
    assert (second.read, second.write, second.fresh) == ({"5m": 20}, {}, 10)


@pytest.mark.parametrize(
    ("what", "is_kept"), [("the namespace", False), ("its lease", False), ("another", True)]
)
def test_what_is_erased_while_it_is_written_is_promised_to_nobody(what: str, is_kept: bool) -> None:
    """The engine keeps nothing of it. A promise in the manager would be met as a broken one, and be
    paid for by the operator, as often as somebody erases what he writes."""
    world = World()
    contract = world.resolve("abc", {2: "5m"})
    (lease,) = contract.leases
    contract.begin(0, [LeaseGrant(lease.lease_id, "5m", "granted", lease.tokens)])
    if what == "the namespace":
        world.manager.entries.erase_namespace(SCOPE.namespace)
    else:
        digest = lease.lease_id if what == "its lease" else "ab" * 16
        world.manager.entries.erase((SCOPE.namespace, bytes.fromhex(digest)))
    contract.written()
    contract.finish("id")

    assert len(world.manager.entries) == is_kept
    assert bool(world.manager.promises.by_class(world.clock())) == is_kept
    assert bool(world.run("abc", {2: "5m"}).breached_tokens) == is_kept
    assert world.run("abc", {2: "5m"}).read == {"5m": 20}


def test_logical_and_physical_hits_are_two_numbers() -> None:
    """What nobody wrote at a breakpoint is not read by contract, though it is not computed."""
    world = World()
    world.run("abc", {})

    record = world.run("abc", {1: "5m"})

    assert record.physical_cached == 29
    assert (record.read, record.write, record.fresh) == ({}, {"5m": 10}, 20)


def test_two_classes_are_charged_each_for_its_own_part() -> None:
    """Multi-class accounting: the longer promise up to its breakpoint, the shorter from there."""
    world = World()
    world.run("a", {1: "1h"})

    record = world.run("abcd", {2: "1h", 3: "5m"})

    assert record.read == {"1h": 10}
    assert record.write == {"1h": 10, "5m": 10}
    assert record.fresh == 10


def test_asking_for_a_longer_promise_is_a_write() -> None:
    """Otherwise an hour could be had for the price of five minutes."""
    world = World()
    world.run("ab", {2: "5m"})

    record = world.run("ab", {2: "1h"})

    assert (record.read, record.write) == ({}, {"1h": 20})


def test_asking_for_a_shorter_promise_reads_what_is_there() -> None:
    """An hour holds five minutes."""
    world = World()
    world.run("ab", {2: "1h"})

    record = world.run("ab", {2: "5m"})

    assert (record.read, record.write) == ({"1h": 20}, {})


def test_an_entry_ends_when_its_time_is_over_and_a_read_renews_it() -> None:
    """From the start of the request that wrote or read it."""
    world = World()
    world.run("ab", {2: "5m"})
    world.clock.advance(299)
    renewed = world.run("ab", {2: "5m"})
    world.clock.advance(299)
    again = world.run("ab", {2: "5m"})
    world.clock.advance(300)

    late = world.run("ab", {2: "5m"})

    assert renewed.read_tokens() == again.read_tokens() == 20
    assert late.read_tokens() == 0
    assert world.last.why_missed() == "expired"


def test_a_broken_promise_is_still_a_read_and_is_counted() -> None:
    """The client was promised; what it costs to compute again is the operator's."""
    world = World()
    world.run("abc", {2: "5m"})
    world.there.clear()

    record = world.run("abc", {2: "5m"})

    assert (record.read, record.fresh, record.physical_cached) == ({"5m": 20}, 10, 0)
    assert record.breached_tokens == 20


def test_an_operator_may_bill_what_was_computed_instead() -> None:
    """By configuration; then a lost prefix is written again."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.there.clear()

    record = world.run("abc", {2: "5m"})

    assert (record.read, record.write) == ({}, {"5m": 20})


@pytest.mark.parametrize(
    ("losses", "epoch", "why"),
    [
        ({"evicted_own_quota": 3}, "first", "evicted_own_quota"),
        ({"evicted_pressure": 3, "evicted_own_quota": 1}, "first", "evicted_pressure"),
        ({"erased": 9}, "first", "erased"),
        ({}, "second", "restarted"),
    ],
)
def test_a_miss_says_what_became_of_the_prefix(
    losses: dict[str, int], epoch: str, why: str
) -> None:
    """Only an engine knows these causes."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.there.clear()
    world.losses, world.epoch = losses, epoch

    world.run("abc", {2: "5m"})

    assert world.last.why_missed() == why


def test_an_entry_is_not_read_before_its_writer_has_a_token() -> None:
    """Equal calls at once all pay: nothing has been written when they start."""
    world = World()
    first = world.resolve("ab", {2: "5m"})
    first.begin(0, [LeaseGrant("", "5m", "granted", 20)])

    early = world.resolve("ab", {2: "5m"}).expect(19)
    first.written()
    later = world.resolve("ab", {2: "5m"}).expect(19)

    assert (early.read_tokens(), early.write_tokens()) == (0, 20)
    assert (later.read_tokens(), later.write_tokens()) == (20, 0)


def test_what_the_engine_refuses_to_keep_is_not_charged_as_kept() -> None:
    """A clipped promise is written, and paid, as far as it goes; a refused one not at all."""
    world = World()

    clipped = world.run("abc", {2: "5m"}, grants=[LeaseGrant("", "5m", "clipped", 16)])
    refused = world.run("xyz", {2: "5m"}, grants=[LeaseGrant("", "5m", "refused", 0)])

    assert (clipped.write, clipped.fresh) == ({"5m": 16}, 14)
    assert (refused.write, refused.fresh) == ({}, 30)


def test_without_caching_fields_what_is_there_is_what_is_read() -> None:
    """Plain prefix caching, to the token."""
    world = World()
    world.run("abc", {}, CacheDirectives())

    record = world.run("abd", {}, CacheDirectives())

    assert (record.read, record.write, record.fresh) == ({"best_effort": 20}, {}, 10)


def test_coarse_reporting_rounds_reads_down_and_reports_no_writes() -> None:
    """The profile of the older hosted models."""
    profile = CacheProfile(granularity=8, min_tokens=16, reports_writes=False)
    world = World(CachingConfig(profiles={"openai": profile}))
    first = world.run("abc", {2: "30m"}, CacheDirectives())

    second = world.run("abd", {2: "30m"}, CacheDirectives())
    short = world.run("ax", {}, CacheDirectives())

    assert (first.read, first.write, first.fresh) == ({}, {}, 30)
    assert (second.read_tokens(), second.fresh) == (16, 14)
    assert short.read_tokens() == 0


def test_a_call_that_wants_nothing_read_reads_nothing() -> None:
    """By contract; the engine saves its work all the same. What it marks is written, and that it
    was written before is no miss."""
    world = World()
    world.run("abc", {2: "30m"}, CacheDirectives())

    plain = world.run("abc", {}, CacheDirectives(lookup="none"))
    marked = world.run("abc", {2: "30m"}, CacheDirectives(lookup="none"))

    assert (plain.read, plain.write, plain.fresh) == ({}, {}, 30)
    assert (marked.read, marked.write, marked.fresh) == ({}, {"30m": 20}, 10)
    assert (plain.physical_cached, world.last.why_missed()) == (29, "")


def test_what_an_earlier_gateway_may_have_written_is_unknown() -> None:
    """Its manager went with it. What cannot have lasted until now was not lost with them, and what
    has been written since is known."""
    world = World(has_past=True)

    why = []
    for words, retention in (("abc", "5m"), ("abcd", "5m"), ("xyz", "1h")):
        world.run(words, {len(words): retention})
        why.append(world.last.why_missed())
    world.clock.advance(300)
    for words, retention in (("pqr", "5m"), ("stu", "1h")):
        world.run(words, {3: retention})
        why.append(world.last.why_missed())

    assert why == ["unknown", "never_written", "unknown", "never_written", "unknown"]


def test_books_that_were_there_from_the_beginning_know_all() -> None:
    """Before a first gateway nobody has written anything."""
    world = World()

    world.run("abc", {3: "24h"})

    assert world.last.why_missed() == "never_written"


def test_what_is_there_has_not_been_missed() -> None:
    """A longer promise is written anew by the caller's wish, and counts in steps fall short of what
    is there: nobody has taken anything away."""
    world = World()
    world.run("abc", {2: "5m"})
    world.run("abc", {2: "1h"})
    longer = world.last.why_missed()
    coarse = World(CachingConfig(profiles={"anthropic": CacheProfile(granularity=8)}))
    coarse.run("abc", {2: "5m"})
    coarse.run("abc", {2: "5m"})
    again = coarse.last.why_missed()
    world.there.clear()
    world.run("abc", {2: "12h"})

    assert (longer, again) == ("", "")
    assert world.last.why_missed() == "evicted_pressure"


def test_what_was_read_in_full_has_no_cause_whatever_it_is_compared_with() -> None:
    """A conversation that leaves the response it names may have been written by a third."""
    ask = CacheDirectives(profile="anthropic", remember=True)
    world = World()
    world.run("abc", {2: "5m"}, ask)
    world.run("xyc", {2: "5m"}, ask)

    again = world.run("abc", {2: "5m"}, replace(ask, compare_with="id"))
    read = world.last
    other = world.run("qbc", {2: "5m"}, replace(ask, compare_with="id"))

    assert (again.read_tokens(), read.why_missed()) == (20, "")
    assert read.diagnosis is not None
    assert (read.diagnosis.outcome, read.diagnosis.cause) == ("miss", "messages")
    assert (other.read_tokens(), world.last.why_missed()) == (0, "messages")


def test_a_resource_is_read_whatever_the_pool_has_lost() -> None:
    """Cached content is pinned until it expires: recomputing it is the operator's cost."""
    terms = Retention("resource", 60, 60, "absolute", renewed_on_read=False, pinned=True)
    world = World()
    ask = CacheDirectives(profile="gemini")
    world.run("ab", {2: "resource"}, ask, classes={"resource": terms})
    world.there.clear()

    record = world.run("abc", {2: "resource"}, ask, classes={"resource": terms})

    assert (record.read, record.fresh) == ({"resource": 20}, 10)


def test_a_breakpoint_below_the_minimum_says_so() -> None:
    """Silently no cache, as the contract has it; and a cause for whoever asks."""
    profiles = {"anthropic": CacheProfile(lookup="written", min_tokens=25)}
    world = World(CachingConfig(profiles=profiles))

    short = world.run("ab", {2: "5m"})
    why = world.last.why_missed()
    long = world.run("abc", {3: "5m"})

    assert (short.write, why) == ({}, "below_minimum")
    assert long.write == {"5m": 30}


def test_a_class_nobody_has_is_refused_by_name() -> None:
    """A promise that cannot be made is not made silently."""
    world = World()

    with pytest.raises(Refusal, match="Unknown retention class '9d'"):
        world.resolve("ab", {1: "9d"})


def test_a_class_outside_the_plan_is_refused() -> None:
    """What a tenant may ask for is its plan's."""
    world = World()

    with pytest.raises(Refusal, match="class '1h' is not allowed"):
        world.resolve("ab", {1: "1h"}, scope=replace(SCOPE, classes=("5m",)))


def test_other_scopes_read_nothing() -> None:
    """Another tenant's, workspace's or partition's prefix is never read."""
    world = World()
    world.run("ab", {2: "5m"})
    world.there.clear()

    record = world.run("ab", {2: "5m"}, scope=CacheScope(b"other", 2, "2/default"))

    assert record.read == {}


CALLS = st.lists(
    st.tuples(
        st.text("ab", min_size=1, max_size=6),
        st.dictionaries(st.integers(1, 6), st.sampled_from(["5m", "1h", "30m"]), max_size=4),
        st.sampled_from(
            [ANTHROPIC, CacheDirectives(), CacheDirectives(lookup="written", implicit="30m")]
        ),
        st.sampled_from([0.0, 1.0, 400.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(CALLS)
def test_the_sums_hold_and_a_repeated_call_reads_what_was_written(calls: list[Any]) -> None:
    """For any prompts, breakpoints, dialects, times and losses."""
    world = World()
    for words, marks, ask, pause_s, is_lost in calls:
        world.clock.advance(pause_s)
        if is_lost:
            world.there.clear()
        inside = {n: name for n, name in marks.items() if n <= len(words)}

        first = world.run(words, inside, ask)
        written = first.read_tokens() + first.write_tokens()
        second = world.run(words, inside, ask)

        for record in (first, second):
            total = record.read_tokens() + record.write_tokens() + record.fresh
            assert total == record.total_in == 10 * len(words)
            assert min([record.fresh, *record.read.values(), *record.write.values()]) >= 0
        assert second.write == {}
        if ask.lookup == "written" or ask is ANTHROPIC:
            assert second.read_tokens() == written
        else:
            assert second.read_tokens() >= written
        world.manager.entries.check()
