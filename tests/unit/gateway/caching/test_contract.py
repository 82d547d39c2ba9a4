"""Caching contracts: reads and writes by the rules, independent of what is physically cached.

`World` stands in for the engine: computed prefixes stay cached until the test removes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import DraftCount, LeaseGrant, LevelWait, LoadMiss, Retention, Started, Usage
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
from tests.tables import each_row

SCOPE = CacheScope(b"ns", 1, "1/default")
ANTHROPIC = CacheDirectives(profile="anthropic")
Outcome = Literal["granted", "clipped", "refused"]


def started(cached_tokens: int, grants: Sequence[LeaseGrant] = (), **more: Any) -> Started:
    """Return the event of an engine that found these tokens."""
    return Started("id", 30, cached_tokens, tuple(grants), **more)


class World:
    """An engine and the contract contracts beside it."""

    def __init__(self, config: CachingConfig | None = None, *, has_past: bool = False) -> None:
        self.clock = FakeClock()
        self.has_disk = False
        self.gap_cause = "window_gone"
        self.epoch = "first"
        self.losses: dict[str, int] = {}
        self.there: list[tuple[int, ...]] = []
        self.contracts = ContractManager(
            config or CachingConfig(),
            self.clock,
            lambda _: self.losses,
            lambda _: self.epoch,
            lambda epoch: epoch == self.epoch,
            has_past=has_past,
            survives=lambda _: self.has_disk,
            unkept_tokens=lambda _: 9 if self.has_disk else 0,
            gap_cause=lambda _: self.gap_cause,
        )

    def resolve(
        self, words: str, marks: dict[int, str], ask: CacheDirectives = ANTHROPIC, **more: Any
    ) -> Contract:
        """Resolve a prompt: a letter is ten tokens; `marks`: retention by block number."""
        boundaries = [
            Boundary(10 * n, f"m[{n}]", marks.get(n), ends_message=True)
            for n in range(1, len(words) + 1)
        ]
        call = Call("m", (Prompt(),), GenerationParameters(), cache=ask)
        self.tokens = tuple(ord(word) for word in words for _ in range(10))
        rendered = Rendered(self.tokens, tuple(boundaries))
        return self.contracts.resolve(call, rendered, more.pop("scope", SCOPE), **more)

    def physical(self) -> int:
        """Return the longest cached prefix, at most all tokens but one."""
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
        """Resolve, run and bill a prompt."""
        contract = self.resolve(words, marks, ask, **more)
        found = self.physical()
        if grants is None:
            grants = [
                LeaseGrant(lease.lease_id, lease.retention.name, "granted", lease.tokens)
                for lease in contract.leases
            ]
        contract.begin(started(found, grants))
        contract.written()
        contract.finish(f"id{len(self.there)}")
        self.there.append(self.tokens)
        self.last = contract
        return contract.record(Usage(len(self.tokens), found, len(self.tokens) - found, 5))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_second_equal_call_reads_what_first_wrote() -> None:
    world = World()

    first = world.run("abc", {2: "5m"})
    second = world.run("abc", {2: "5m"})

    assert (first.read, first.write, first.fresh) == ({}, {"5m": 20}, 10)
    assert (second.read, second.write, second.fresh) == ({"5m": 20}, {}, 10)


@pytest.mark.parametrize(
    ("what", "is_kept"), [("the namespace", False), ("its lease", False), ("another", True)]
)
def test_prefix_erased_while_written_is_not_promised(what: str, is_kept: bool) -> None:
    """The engine keeps none of it. A promise in the index would count as broken and be paid by the
    operator, each time a client erases during a request."""
    world = World()
    contract = world.resolve("abc", {2: "5m"})
    (lease,) = contract.leases
    contract.begin(started(0, [LeaseGrant(lease.lease_id, "5m", "granted", lease.tokens)]))
    if what == "the namespace":
        world.contracts.entries.erase_namespace(SCOPE.namespace)
    else:
        digest = lease.lease_id if what == "its lease" else "ab" * 16
        world.contracts.entries.erase((SCOPE.namespace, bytes.fromhex(digest)))
    contract.written()
    contract.finish("id")

    assert len(world.contracts.entries) == is_kept
    assert bool(world.contracts.promises.by_class(world.clock())) == is_kept
    assert bool(world.run("abc", {2: "5m"}).recomputed_promised) == is_kept
    assert world.run("abc", {2: "5m"}).read == {"5m": 20}


def test_logical_and_physical_hits_differ() -> None:
    """A prefix that was not written at a breakpoint is not read by contract, though cached."""
    world = World()
    world.run("abc", {})

    record = world.run("abc", {1: "5m"})

    assert record.physical_cached == 29
    assert (record.read, record.write, record.fresh) == ({}, {"5m": 10}, 20)


def test_two_classes_are_charged_separately() -> None:
    """The longer promise up to its breakpoint, the shorter one from there."""
    world = World()
    world.run("a", {1: "1h"})

    record = world.run("abcd", {2: "1h", 3: "5m"})

    assert record.read == {"1h": 10}
    assert record.write == {"1h": 10, "5m": 10}
    assert record.fresh == 10


@pytest.mark.parametrize(
    ("first", "second", "read", "write"),
    [("5m", "1h", {}, {"1h": 20}), ("1h", "5m", {"1h": 20}, {})],
)
def test_only_a_longer_promise_is_a_write(
    first: str, second: str, read: dict[str, int], write: dict[str, int]
) -> None:
    """Otherwise an hour would cost as much as five minutes."""
    world = World()
    world.run("ab", {2: first})

    record = world.run("ab", {2: second})

    assert (record.read, record.write) == (read, write)


def test_entry_expires_unless_read() -> None:
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


def test_broken_promise_is_billed_as_read_and_counted() -> None:
    """The operator pays for the recomputation."""
    world = World()
    world.run("abc", {2: "5m"})
    world.there.clear()

    record = world.run("abc", {2: "5m"})

    assert (record.read, record.fresh, record.physical_cached) == ({"5m": 20}, 10, 0)
    assert record.recomputed_promised == 20
    assert not world.last.is_broken_by_death


def test_a_promise_that_ended_with_its_engine_says_so() -> None:
    """A finding tells the operator what would have kept it."""
    world = World()
    world.run("abc", {2: "5m"})
    world.there.clear()
    world.epoch = "second"

    record = world.run("abc", {2: "5m"})

    assert record.recomputed_promised == 20
    assert world.last.is_broken_by_death


def test_broken_promise_is_written_again_if_not_honoured() -> None:
    """By configuration."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.there.clear()

    record = world.run("abc", {2: "5m"})

    assert (record.read, record.write) == ({}, {"5m": 20})


@each_row(
    ("losses", "epoch", "why"),
    [
        ({"evicted_own_quota": 3}, "first", "evicted_own_quota"),
        ({"evicted_pressure": 3, "evicted_own_quota": 1}, "first", "evicted_pressure"),
        ({"erased": 9}, "first", "erased"),
        ({}, "second", "restarted"),
    ],
)
def test_miss_cause_is_the_loss_of_the_prefix(losses: dict[str, int], epoch: str, why: str) -> None:
    """Only an engine knows these causes."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.there.clear()
    world.losses, world.epoch = losses, epoch

    world.run("abc", {2: "5m"})

    assert world.last.why_missed() == why


def test_entry_is_readable_after_writers_first_token() -> None:
    """Equal concurrent calls all pay: nothing is written when they start."""
    world = World()
    first = world.resolve("ab", {2: "5m"})
    first.begin(started(0, [LeaseGrant("", "5m", "granted", 20)]))

    early = world.resolve("ab", {2: "5m"}).expect(19)
    first.written()
    later = world.resolve("ab", {2: "5m"}).expect(19)

    assert (early.read_tokens(), early.write_tokens()) == (0, 20)
    assert (later.read_tokens(), later.write_tokens()) == (20, 0)


def test_ungranted_promise_is_not_charged() -> None:
    """A clipped promise is written and paid as far as it goes; a refused one not at all."""
    world = World()

    clipped = world.run("abc", {2: "5m"}, grants=[LeaseGrant("", "5m", "clipped", 16)])
    refused = world.run("xyz", {2: "5m"}, grants=[LeaseGrant("", "5m", "refused", 0)])

    assert (clipped.write, clipped.fresh) == ({"5m": 16}, 14)
    assert (refused.write, refused.fresh) == ({}, 30)


def test_plain_prefix_caching_reads_cached_tokens() -> None:
    """To the token."""
    world = World()
    world.run("abc", {}, CacheDirectives())

    record = world.run("abd", {}, CacheDirectives())

    assert (record.read, record.write, record.fresh) == ({"best_effort": 20}, {}, 10)


def test_granularity_rounds_reads_down() -> None:
    """The profile of the older hosted models, which report no writes."""
    profile = CacheProfile(granularity=8, min_tokens=16, reports_writes=False)
    world = World(CachingConfig(profiles={"openai": profile}))
    first = world.run("abc", {2: "30m"}, CacheDirectives())

    second = world.run("abd", {2: "30m"}, CacheDirectives())
    short = world.run("ax", {}, CacheDirectives())

    assert (first.read, first.write, first.fresh) == ({}, {}, 30)
    assert (second.read_tokens(), second.fresh) == (16, 14)
    assert short.read_tokens() == 0


def test_lookup_none_reads_nothing() -> None:
    """By contract; the engine still uses its cache. Its breakpoints are written, and an earlier
    write is no miss."""
    world = World()
    world.run("abc", {2: "30m"}, CacheDirectives())

    plain = world.run("abc", {}, CacheDirectives(lookup="none"))
    marked = world.run("abc", {2: "30m"}, CacheDirectives(lookup="none"))

    assert (plain.read, plain.write, plain.fresh) == ({}, {}, 30)
    assert (marked.read, marked.write, marked.fresh) == ({}, {"30m": 20}, 10)
    assert (plain.physical_cached, world.last.why_missed()) == (29, "")


def test_miss_is_unknown_if_index_is_younger_than_retention() -> None:
    """The index of an earlier process is lost. Retention that has passed since, and later writes,
    are known."""
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


def test_first_gateway_knows_all_writes() -> None:
    world = World()

    world.run("abc", {3: "24h"})

    assert world.last.why_missed() == "never_written"


def test_cached_prefix_is_no_miss() -> None:
    """A longer promise is written again by the caller's wish, and coarse counts report less than is
    cached."""
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


def test_tokens_that_a_freed_window_cost_have_their_own_cause() -> None:
    """Group 0 of the KV has the prefix; resuming there needs a window whose blocks were freed."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.losses = {"evicted_pressure": 3}

    partly = world.resolve("abd", {2: "5m"})
    partly.begin(started(0, resume_gap_tokens=15))
    wholly = world.resolve("abd", {2: "5m"})
    wholly.begin(started(0, resume_gap_tokens=20))

    assert (partly.why_missed(), wholly.why_missed()) == ("evicted_pressure", "window_gone")
    assert world.resolve("abd", {2: "5m"}).explain(0, 20) == "window_gone"


def test_a_gap_of_a_model_with_states_is_named_after_them() -> None:
    """The blocks are there; only where a state was kept can a prompt resume."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.gap_cause = "state_gap"
    world.run("abc", {2: "5m"})
    world.losses = {"evicted_pressure": 3}

    partly = world.resolve("abd", {2: "5m"})
    partly.begin(started(0, resume_gap_tokens=15))
    wholly = world.resolve("abd", {2: "5m"})
    wholly.begin(started(0, resume_gap_tokens=20))

    assert (partly.why_missed(), wholly.why_missed()) == ("evicted_pressure", "state_gap")


@each_row(
    ("cause", "tokens", "cached", "told"),
    [
        ("damaged", 20, 0, "damaged"),
        ("level_failed", 16, 0, "level_failed"),
        ("not_worth_loading", 8, 4, "not_worth_loading"),
        ("damaged", 9, 0, "evicted_pressure"),
        ("", 20, 0, "evicted_pressure"),
    ],
)
def test_what_a_level_did_not_bring_has_its_own_cause(
    cause: LoadMiss, tokens: int, cached: int, told: str
) -> None:
    """Where a level had most of what is missing, the loss of the device's blocks is no cause."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.losses = {"evicted_pressure": 3}

    contract = world.resolve("abd", {2: "5m"})
    contract.begin(started(cached, wait=LevelWait(0.0, None, tokens, cause)))

    assert contract.why_missed() == told


def test_a_level_that_failed_after_a_restart_is_the_cause() -> None:
    """The disk had what the engine before wrote; but what has expired would not be read at all."""
    world = World(CachingConfig(honour_broken_promises=False))
    world.run("abc", {2: "5m"})
    world.epoch = "second"
    failed = world.resolve("abd", {2: "5m"})
    failed.begin(started(0, wait=LevelWait(0.0, None, 20, "level_failed")))
    world.clock.advance(301)
    late = world.resolve("abd", {2: "5m"})
    late.begin(started(0, wait=LevelWait(0.0, None, 20, "level_failed")))

    assert (failed.why_missed(), late.why_missed()) == ("level_failed", "restarted")


def test_loaded_tokens_are_in_the_usage() -> None:
    """The ledger has them beside the cached ones."""
    world = World()
    contract = world.resolve("abd", {2: "5m"})
    record = contract.begin(started(20, loaded_tokens=(("host", 12), ("disk", 4))))

    assert record.loaded == {"host": 12, "disk": 4}
    assert contract.record(Usage(30, 20, 10, 5)).loaded == {"host": 12, "disk": 4}


def test_drafts_from_the_prediction_are_in_the_usage_and_no_other() -> None:
    """A client is told of its own prediction; what else was drafted changes no bill."""
    world = World()
    contract = world.resolve("abd", {})
    contract.begin(started(0))
    drafts = (DraftCount("ngram", 40, 4), DraftCount("prediction", 10, 7))
    record = contract.record(Usage(30, 0, 30, 12, drafts=drafts))

    assert (record.out, record.prediction) == (12, (7, 3))
    assert contract.record(Usage(30, 0, 30, 12)).prediction == (0, 0)


def test_full_read_has_no_miss_cause() -> None:
    """Also if the prompt differs from the response it is compared with."""
    ask = CacheDirectives(profile="anthropic", remember=True)
    world = World()
    world.run("abc", {2: "5m"}, ask)
    world.run("xyc", {2: "5m"}, ask)

    again = world.run("abc", {2: "5m"}, replace(ask, compare_with="id1"))
    read = world.last
    other = world.run("qbc", {2: "5m"}, replace(ask, compare_with="id1"))

    assert (again.read_tokens(), read.why_missed()) == (20, "")
    assert read.diagnosis is not None
    assert (read.diagnosis.outcome, read.diagnosis.cause) == ("miss", "messages")
    assert (other.read_tokens(), world.last.why_missed()) == (0, "messages")


def test_cached_content_is_read_even_if_lost() -> None:
    """It is pinned until it expires: the operator pays for the recomputation."""
    terms = Retention("resource", 60, 60, "absolute", renewed_on_read=False, pinned=True)
    world = World()
    ask = CacheDirectives(profile="gemini")
    world.run("ab", {2: "resource"}, ask, classes={"resource": terms})
    world.there.clear()

    record = world.run("abc", {2: "resource"}, ask, classes={"resource": terms})

    assert (record.read, record.fresh) == ({"resource": 20}, 10)


def test_miss_below_minimum() -> None:
    profiles = {"anthropic": CacheProfile(lookup="written", min_tokens=25)}
    world = World(CachingConfig(profiles=profiles))

    short = world.run("ab", {2: "5m"})
    why = world.last.why_missed()
    long = world.run("abc", {3: "5m"})

    assert (short.write, why) == ({}, "below_minimum")
    assert long.write == {"5m": 30}


def test_refuses_unknown_class() -> None:
    """A promise that cannot be made is not ignored silently."""
    world = World()

    with pytest.raises(Refusal, match="Unknown retention class '9d'"):
        world.resolve("ab", {1: "9d"})


def test_refuses_class_the_tenant_may_not_use() -> None:
    world = World()

    with pytest.raises(Refusal, match="class '1h' is not allowed"):
        world.resolve("ab", {1: "1h"}, scope=replace(SCOPE, classes=("5m",)))


@each_row(
    ("default", "marks", "written"),
    [
        (None, {1: "5m?"}, {"5m": 10}),
        ("1h", {1: "5m?"}, {"1h": 10}),
        ("1h", {1: "5m"}, {"5m": 10}),
        ("1h", {1: "1h", 2: "5m?"}, {"1h": 20}),
        ("1h", {}, {"1h": 20}),
        (None, {}, {}),
    ],
)
def test_a_tenants_default_class_is_for_requests_that_name_none(
    default: str | None, marks: dict[int, str], written: dict[str, int]
) -> None:
    """A breakpoint without a class, and a request without a breakpoint; named classes stay."""
    scope = replace(SCOPE, default_class=default)

    assert World().run("ab", marks, scope=scope).write == written


def test_a_default_class_leaves_lookups_and_opt_outs_unchanged() -> None:
    """OpenAI's implicit reads go on; a request that turned its cache off writes nothing."""
    world, scope = World(), replace(SCOPE, default_class="1h")
    world.run("ab", {})
    read = world.run("ab", {}, CacheDirectives(), scope=scope)
    off = world.run("ab", {}, CacheDirectives(lookup="none"), scope=scope)

    assert sum(read.read.values()) == 19
    assert off.write == {}


def test_scopes_are_separate() -> None:
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
def test_sums_hold_and_repeated_call_reads_what_was_written(calls: list[Any]) -> None:
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
        world.contracts.entries.check()
