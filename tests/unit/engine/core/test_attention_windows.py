"""Requests with an attention window over the token oracle: what they hold, share and are told."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import (
    AttentionWindow,
    CacheGrant,
    Finished,
    LeaseGrant,
    LeaseRequest,
    Quota,
    Request,
    Retention,
)
from engine.cache import BlockTable, PrefixCache
from tests.fakes import OracleError
from tests.unit.engine.recorded_engine import RecordedWorld, tokens
from tests.unit.engine.tiny_engines import GREEDY

WINDOW = AttentionWindow(8, 4)
SHARED = 16
"""Tokens that a request with `WINDOW` shares: a block of sinks, two of window, and one."""
HOUR = Retention("1h", promise_s=3600, limit_s=3600)


def world(**settings: Any) -> RecordedWorld:
    return RecordedWorld(attention_policies=("window",), **settings)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sequence_holds_its_sinks_and_its_window_alone(depth: int) -> None:
    """A prompt of 300 tokens and 40 of output run in a pool of 80."""
    found = world(blocks=20, depth=depth)
    found.ask("long", tokens(300), max_tokens=40, attention=WINDOW)
    held = []
    while found.live:
        found.step()
        held += [s.table.held_blocks for s in found.core.scheduler.running if s.table is not None]

    assert found.endings == {"done": 1}
    step_blocks = depth * 4
    assert max(held) <= WINDOW.in_blocks(4).blocks_of(1000, step_blocks)
    assert held[-1] <= 1 + 2 + 3, "sinks, window, its own block, and the steps in flight"


def test_nothing_beyond_the_window_is_found() -> None:
    """The blocks up to the window are shared with everyone, and nothing behind them."""
    found = world()
    found.ask("window", tokens(60), max_tokens=9, attention=WINDOW)
    found.settle()
    found.ask("plain", tokens(60))
    found.settle()

    assert found.cached("plain") == SHARED
    assert found.peek(b"n", (*tokens(60), 0)) == 60


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_tail_beyond_the_window_is_not_left_to_the_tree(
    is_planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that ends two tokens behind what it shares keeps these out of the tree. Were they
    in it, the oracle would see the next request read them."""
    commit_tail = PrefixCache._commit_tail

    def left(self: PrefixCache, table: BlockTable, *rest: Any) -> None:
        table.attention, kept = None, table.attention
        commit_tail(self, table, *rest)
        table.attention = kept

    if is_planted:
        monkeypatch.setattr(PrefixCache, "_commit_tail", left)
    found = world()
    found.ask("window", tokens(SHARED + 1), max_tokens=2, attention=WINDOW)
    found.settle()
    whole = (*tokens(SHARED + 1), *found.streams["window"].outputs[0], 0)
    found.ask("plain", whole)
    if is_planted:
        with pytest.raises(OracleError, match="holds another prefix"):
            found.settle()
        return
    found.settle()

    assert found.cached("plain") == SHARED


def test_a_window_reads_what_it_shares_alone() -> None:
    """What others computed behind the window had other keys before it."""
    found = world()
    found.ask("plain", tokens(60))
    found.settle()
    found.ask("window", tokens(60), attention=WINDOW)
    found.ask("short", tokens(14), attention=WINDOW)
    found.settle()

    assert found.cached("window") == SHARED
    assert found.cached("short") == 13


def test_a_follower_waits_for_what_is_shared_alone() -> None:
    """A request behind a leader with a window computes the rest itself, and the other way round."""
    found = world(step_tokens_max=8)
    found.ask("leader", tokens(60), attention=WINDOW)
    found.step()
    found.ask("plain", tokens(60))
    found.ask("window", tokens(60), attention=WINDOW)
    found.settle()

    assert (found.cached("plain"), found.cached("window")) == (SHARED, SHARED)
    assert found.runner.computed_tokens == 3 * (60 + 3) - 2 * SHARED


def test_a_preempted_sequence_reads_the_same_keys_again() -> None:
    """Two long answers that do not fit together both end right, one computed anew."""
    found = world(blocks=18)
    found.ask("first", tokens(20), max_tokens=50)
    found.ask("second", tokens(30, 3), max_tokens=60, attention=WINDOW)
    found.ask("third", tokens(30, 5), max_tokens=60, attention=WINDOW)
    found.settle()

    assert found.endings == {"done": 3}
    assert sum(found.preemptions(name) for name in ("second", "third")) > 0


def test_samples_share_a_prompt_and_let_it_go() -> None:
    """Forks of a prompt behind the window hold the same blocks, and free them once each."""
    found = world()
    found.ask("n", tokens(50), max_tokens=30, samples=3, attention=WINDOW)
    found.settle()

    assert found.endings == {"done": 1}


def test_leases_beyond_the_window_are_refused_by_name() -> None:
    """A lease inside is promised as usual; the prefix behind the window cannot be kept."""
    found = world()
    leases = (LeaseRequest(40, HOUR, "long"), LeaseRequest(12, HOUR, "inside"))
    found.ask("window", tokens(60), attention=WINDOW, grant=CacheGrant(b"n", leases=leases))
    found.settle()

    started = found.streams["window"].started
    assert started is not None
    assert started.leases == (
        LeaseGrant("long", "1h", "refused", 0, "attention"),
        LeaseGrant("inside", "1h", "granted", 12),
    )
    assert found.cache.use(b"n").promised == {"1h": 3}


def test_a_promised_prefix_stays_when_the_sequence_lets_it_go() -> None:
    """The blocks that the window has passed are cached and promised, and no longer pinned."""
    found = world(blocks=24)
    lease = LeaseRequest(SHARED, HOUR, "all")
    found.ask(
        "window", tokens(200), max_tokens=20, attention=WINDOW,
        grant=CacheGrant(b"n", leases=(lease,)),
    )  # fmt: skip
    while found.live:
        found.step()
        (running,) = found.core.scheduler.running or (None,)
        if running is not None and running.table is not None and running.table.kv_tokens > 100:
            assert found.cache.use(b"n").promised == {"1h": 4}
            assert running.table.blocks[0] >= 0
            assert running.table.blocks[1:4] == [-1] * 3
    found.ask("again", tokens(60))
    found.settle()

    assert found.cached("again") == SHARED


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"attention": AttentionWindow(6, 4)}, "attention_invalid"),
        ({"attention": AttentionWindow(8, 3)}, "attention_invalid"),
        ({"attention": WINDOW, "prompt_logprobs": 0}, "attention_with_prompt_logprobs"),
    ],
)
def test_what_would_not_be_exact_is_refused_by_name(asked: dict[str, Any], code: str) -> None:
    """Whole blocks alone, and no logprobs of prompts that the window cuts."""
    found = world()
    found.core.submit(Request("r", tokens(40), 1, CacheGrant(b"n"), GREEDY, **asked))
    (event,) = found.core.step()

    assert isinstance(event, Finished)
    assert (event.ending, event.code) == ("refused", code)


def test_logprobs_of_a_prompt_inside_the_window_are_the_models() -> None:
    """A window that hides nothing changes nothing."""
    found = world()
    found.ask("short", tokens(SHARED), prompt_logprobs=0, attention=WINDOW)
    found.settle()

    assert found.endings == {"done": 1}


@pytest.mark.parametrize("lacks", ["", "no kernel computes them"])
def test_a_window_that_is_not_allowed_or_not_computed_is_refused(lacks: str) -> None:
    """By the configuration first; then by the engine, which says what it lacks."""
    found = RecordedWorld(attention_policies=("window",) if lacks else ())
    found.core.attention_lacks = lacks
    found.core.submit(Request("r", tokens(8), 1, CacheGrant(b"n"), GREEDY, attention=WINDOW))
    (event,) = found.core.step()

    assert isinstance(event, Finished)
    assert event.code == ("attention_not_available" if lacks else "attention_not_allowed")
    assert lacks in event.message


def test_a_ceiling_counts_what_a_sequence_holds() -> None:
    """A tenant of 12 blocks may run 200 tokens under a window, and not without."""
    found = world()
    quota = Quota(ceiling_blocks=12)
    found.ask("window", tokens(180), max_tokens=20, quota=quota, attention=WINDOW)
    found.ask("plain", tokens(180), max_tokens=20, quota=quota)
    found.settle()

    assert found.endings == {"done": 1, "refused kv_exceeded": 1}
    assert found.final("plain").ending == "refused"


def test_promises_of_window_blocks_end_with_their_nodes() -> None:
    """A promise from the last use lapses once the window has passed it, in every group: the end of
    the sequence renews none of its blocks."""
    found = world(blocks=200, windows=(3,))
    lease = LeaseRequest(SHARED, Retention("5s", promise_s=5), "all")
    found.ask(
        "window", tokens(200), max_tokens=20, attention=WINDOW,
        grant=CacheGrant(b"n", leases=(lease,)),
    )  # fmt: skip
    found.step_on(20)
    assert found.cache.use(b"n").promised["5s"] > 4
    found.clock.advance(60.0)
    found.settle()

    assert found.cache.use(b"n").promised.get("5s", 0) <= 1, "the sinks, in use until the end"
