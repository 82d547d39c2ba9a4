"""What other engines ask for takes a bounded part of the bandwidth while sequences run here."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from engine.api import CacheGrant, Peer, Quota, Request, Sampling
from engine.levels.peers.sharing import RUNNING_PART
from engine.moves import FetchedBlocks, LentBlocks, PeerMiss, ShareRuns
from tests.fake_levels import Weather
from tests.property.test_peers import SIZE, Side, pair_of, rest

OTHER = tuple(random.Random(4).randrange(3) for _ in range(26))
PROMPT = tuple(random.Random(3).randrange(3) for _ in range(24))
RUNS = len(PROMPT) // SIZE
COPIES_PER_S, STEP_S = 10.0, 0.25


class Reader:
    """Counts what it gets."""

    def __init__(self) -> None:
        self.came = self.unsent = 0
        self.why: str | None = None
        self.lent = list[int]()

    def take(self, check: bytes, limit_s: float | None, content: memoryview) -> None:
        self.came += 1
        self.unsent += 1

    def lend(self, lent: LentBlocks) -> None:
        self.lent += lent.blocks

    def end(self, why: str) -> None:
        self.why = why


def step(side: Side, reader: Reader) -> None:
    """Let time pass, and all that came leave."""
    side.world.clock.advance(STEP_S)
    side.world.step()
    while reader.unsent:
        reader.unsent -= 1
        side.sharing().told_sent(reader)


def asked(name: str, namespace: bytes, prompt: tuple[int, ...], tokens: int) -> Request:
    grant = CacheGrant(namespace, Quota(payer=b"p"))
    return Request(name, prompt, tokens, grant, Sampling(temperature=0))


def test_shares_take_a_tenth_of_the_bandwidth_while_sequences_run() -> None:
    """When none runs any more, the rest of the same share is sent without a bound."""
    sides = source, _ = pair_of(random.Random(1), Weather(polls_max=1, fails=0.0))
    source.world.submit(asked("a", b"a", PROMPT, 1))
    rest(sides)
    pace, reader = source.levels().paces["host"], Reader()
    pace.block_s[:] = [1 / COPIES_PER_S] * len(pace.block_s)
    source.world.submit(asked("b", b"b", PROMPT[:2], 20))
    step(source, reader)
    names = source.levels().places.formats
    form = names.formats[names.of(b"a")].name
    source.sharing().begin(ShareRuns(b"a", PROMPT, 0, form), reader, source.world.clock())
    began_s, sent = source.world.clock(), list[tuple[float, int]]()
    while len(source.world.core.scheduler.running):
        step(source, reader)
        sent.append((source.world.clock() - began_s, reader.came))
    came = reader.came
    while reader.why is None:
        step(source, reader)

    rate = RUNNING_PART * COPIES_PER_S
    assert all(count <= passed_s * rate + 1 for passed_s, count in sent)
    assert 1 < came < RUNS
    assert sent[-1][0] * rate - 2 <= came, "the part is used"
    assert (reader.why, reader.came) == ("", RUNS)


def test_a_request_waits_for_what_is_lent() -> None:
    """It would fail for want of room after a few empty steps, which take no time; a reader returns
    blocks within milliseconds."""
    sides = source, _ = pair_of(random.Random(1), Weather(polls_max=1, fails=0.0))
    source.world.submit(asked("a", b"a", PROMPT, 1))
    rest(sides)
    reader, wanted = Reader(), ShareRuns(b"a", PROMPT, 0, "", is_near=True)
    source.sharing().begin(wanted, reader, source.world.clock())
    source.world.submit(asked("b", b"b", OTHER, 3))
    for _ in range(60):
        source.world.clock.advance(0.001)
        source.world.step()
    source.sharing().returned(reader)
    rest(sides)
    ended = source.world.streams["b"].finished

    assert (len(reader.lent), reader.why) == (RUNS, "")
    assert ended is not None
    assert ended.ending == "done"


@pytest.mark.parametrize(
    ("why", "cached"), [("unreadable", 22), ("lacking", 22), ("refused", 0), ("lost", 0)]
)
def test_copies_come_where_a_pool_is_out_of_reach(
    monkeypatch: pytest.MonkeyPatch, why: PeerMiss, cached: int
) -> None:
    """Or where the device has nothing of it. Who refuses, or is gone, is not asked again."""
    sides = source, reader = pair_of(random.Random(1), Weather(polls_max=1, fails=0.0))
    source.world.submit(asked("a", b"a", PROMPT, 1))
    rest(sides)
    ends = list[FetchedBlocks]()
    monkeypatch.setattr(
        reader.link, "fetch_blocks", lambda one: ends.append(FetchedBlocks(one.call_id, why))
    )
    monkeypatch.setattr(reader.link, "poll_blocks", lambda: [ends.pop() for _ in range(len(ends))])
    peer = Peer("o", "h", 1, len(PROMPT), b"", is_near=True)
    reader.world.submit(replace(asked("n", b"a", PROMPT, 1), peer=peer))
    rest(sides)
    started = reader.world.streams["n"].started

    assert started is not None
    assert started.cached_tokens == cached
    assert (reader.near_fetching().bytes_per_s == 0) == (why == "unreadable")
