"""A prompt that one engine computes for the answer of another: outcomes, and whose tokens count.

Engines say what a test has them say. Where an answer is computed for real, and books are compared,
see `tests/crash/test_prompts_apart.py` and `tests/integration/test_apart_books.py`.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from engine.api import (
    CacheGrant,
    Cancel,
    Ending,
    EngineRole,
    Event,
    Finished,
    LeaseGrant,
    LeaseRequest,
    LevelName,
    Request,
    Retention,
    SampledToken,
    Started,
    Tokens,
    Usage,
)
from engine.client.request_stream import RequestStream
from engine.statistics import LoadReport
from engine.strides import PrefixChanges
from gateway.engines.apart import prompts_apart
from gateway.engines.replicas import Replicas
from tests.fakes import FakeClock
from tests.unit.gateway.engines.test_replica_choice import INFO, RecordedEngine

PROMPT = tuple(range(8_000))
HOUR = Retention("1h", promise_s=3_600, limit_s=3_600)
BUSY = LoadReport(
    free_blocks=4_096,
    promisable_blocks=4_096,
    prefill_tokens_per_s=10_000.0,
    peer_bytes_per_s=1e10,
    rows=20,
)
CLIENTS = Request("r", PROMPT, 8, CacheGrant(b"n", leases=(LeaseRequest(4_000, HOUR, "ab"),)))


class World:
    """A replica for prompts (p), and two for answers (d, d2) on which many answers run."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.clock = FakeClock()
        self.replicas = Replicas(clock=self.clock, prompts_apart=is_on)
        roles: dict[str, EngineRole] = {"p": "prefill", "d": "decode", "d2": "decode"}
        self.engines = {name: RecordedEngine(name) for name in roles}
        for name, engine in self.engines.items():
            engine.info = replace(INFO, epoch=name, role=roles[name], blocks=4_096)
            added = self.replicas.add(name, engine, is_elsewhere=True)
            added.address = "127.0.0.1", 1
            added.hold(engine)
            engine.receive([PrefixChanges(is_first=True), self.load(name)])

    def load(self, name: str) -> LoadReport:
        rows = {"p": 0, "d": 20, "d2": 40}[name]
        return replace(BUSY, rows=rows, accepted=len(self.engines[name].sent))

    def submit(self, request: Request = CLIENTS) -> RequestStream:
        return self.replicas.submit(request)

    def sent(self, name: str) -> list[str]:
        return [one.request_id for one in self.engines[name].sent]

    def say(self, name: str, *events: Event) -> None:
        self.engines[name].receive(events)

    def begin(self, name: str, request_id: str, cached: int = 0, fetched: int = 0) -> None:
        loaded: tuple[tuple[LevelName, int], ...] = (("peer", fetched),) if fetched else ()
        leases = (LeaseGrant("ab", "1h", "granted", 4_000),) if request_id == "r" else ()
        self.say(name, Started(request_id, len(PROMPT), cached, leases, loaded_tokens=loaded))

    def end(self, name: str, request_id: str, ending: Ending = "done", code: str = "") -> None:
        usage = Usage(prompt_tokens=len(PROMPT), computed_tokens=len(PROMPT))
        self.say(name, Finished(request_id, ending, usage, code, code))

    def answer(self, name: str, cached: int = 0, fetched: int = 0) -> None:
        self.begin(name, "r", cached, fetched)
        usage = Usage(len(PROMPT), cached, len(PROMPT) - cached, 1)
        self.say(name, Tokens("r", 0, (SampledToken(7),)), Finished("r", "done", usage))

    @property
    def outcomes(self) -> dict[str, int]:
        return {name: count for name, count in self.replicas.apart.outcomes.items() if count}


async def settle() -> None:
    """Let what waits for the events so far run."""
    for _ in range(8):
        await asyncio.sleep(0)


async def whole(stream: RequestStream) -> tuple[list[Event], Finished]:
    """Return the events of a stream, of which the last is the only end."""
    async with asyncio.timeout(10):
        events = [event async for event in stream]
    ends = [event for event in events if isinstance(event, Finished)]
    assert events[-1:] == ends
    return events, ends[0]


async def test_the_answer_fetches_what_another_engine_has_computed() -> None:
    """The prompt is no client's, without output or promise; then the client's request names it."""
    world = World()
    stream = world.submit()
    (prompt,) = world.engines["p"].sent
    before = world.sent("d")
    world.begin("p", prompt.request_id)
    world.end("p", prompt.request_id)
    await settle()
    (asked,) = world.engines["d"].sent
    world.answer("d", cached=7_984, fetched=7_984)
    events, end = await whole(stream)

    assert (prompt.request_id, prompt.max_tokens, prompt.adopts) == ("r/prompt", 0, True)
    assert (prompt.tokens, prompt.grant.leases) == (PROMPT, ())
    assert before == []
    assert asked.peer is not None
    assert (asked.peer.name, asked.peer.tokens) == ("p", len(PROMPT))
    assert replace(asked, peer=None, expected_cached_tokens=0) == CLIENTS
    assert world.outcomes == {"apart": 1}
    (started,) = [one for one in events if isinstance(one, Started)]
    assert started.leases == (LeaseGrant("ab", "1h", "granted", 4_000),)
    assert end.usage.computed_tokens == len(PROMPT)
    assert stream.epoch == "d"


@pytest.mark.parametrize(
    ("there", "own", "expected"), [(0, 0, 0), (1_024, 0, 1_024), (0, 512, 512), (1_024, 512, 1_024)]
)
async def test_what_was_computed_for_a_request_is_no_hit_of_it(
    there: int, own: int, expected: int
) -> None:
    """Cached is what was cached before, on the better of the two. Its entry has so much less than
    the answering engine has counted, and the books know the difference."""
    world = World()
    stream = world.submit()
    world.begin("p", "r/prompt", cached=there)
    world.end("p", "r/prompt")
    await settle()
    world.answer("d", cached=7_984, fetched=7_984 - own)
    events, end = await whole(stream)
    (started,) = [one for one in events if isinstance(one, Started)]

    assert started.cached_tokens == end.usage.cached_tokens == expected
    assert end.usage.computed_tokens == len(PROMPT) - expected
    assert stream.correction == (0, expected - 7_984, 0)
    assert all(level != "peer" for level, _ in started.loaded_tokens)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [("queue_full", "busy"), ("engine_died", "lost"), ("step_failed", "failed")],
)
async def test_a_prompt_that_fails_is_computed_where_it_is_answered(
    code: str, outcome: str
) -> None:
    """The client sees nothing of it, and fetches nothing."""
    world = World()
    stream = world.submit()
    if code == "engine_died":
        world.engines["p"].mark_lost("killed")
    else:
        world.end("p", "r/prompt", "failed", code)
    await settle()
    world.answer("d")
    _, end = await whole(stream)

    assert (end.ending, end.usage.computed_tokens) == ("done", len(PROMPT))
    assert world.engines["d"].sent[0].peer is None
    assert world.outcomes == {outcome: 1}
    assert stream.correction == (0, 0, 0)


@pytest.mark.parametrize("has_begun", [True, False])
async def test_a_late_prompt_is_left_and_what_it_has_is_fetched(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """A prompt that has not begun has nothing to fetch."""
    monkeypatch.setattr(prompts_apart, "LATE_S_MIN", 0.0)
    monkeypatch.setattr(prompts_apart, "LATE_FACTOR", 0.0)
    world = World()
    posted, post = list[object](), world.engines["p"].post

    def note(command: object) -> None:
        posted.append(command)
        post(command)

    monkeypatch.setattr(world.engines["p"], "post", note)
    stream = world.submit()
    if has_begun:
        world.begin("p", "r/prompt")
    async with asyncio.timeout(10):
        while not world.sent("d"):  # noqa: ASYNC110
            await asyncio.sleep(0)
    world.answer("d", cached=4_000 * has_begun, fetched=4_000 * has_begun)
    _, end = await whole(stream)

    assert (world.engines["d"].sent[0].peer is not None) == has_begun
    assert Cancel("r/prompt") in posted
    assert end.usage.computed_tokens == len(PROMPT)
    assert world.outcomes == {"late": 1}


async def test_a_client_that_leaves_ends_the_prompt_too() -> None:
    """It pays for the prompt as if its engine had begun it; no engine enters it."""
    world = World()
    stream = world.submit()
    world.begin("p", "r/prompt", cached=1_024)
    await settle()
    end = await stream.cancel()
    await settle()

    assert end is not None
    assert (end.ending, end.usage.prompt_tokens, end.usage.cached_tokens) == (
        *("cancelled", len(PROMPT)),
        1_024,
    )
    assert not world.engines["p"].has_request("r/prompt")
    assert world.sent("d") == []
    assert stream.correction == (len(PROMPT), 1_024, 0)
    assert world.outcomes == {"cancelled": 1}


async def test_a_reader_that_goes_ends_the_prompt_too() -> None:
    """Also before anything has run."""
    world = World()
    stream = world.submit()
    await stream.aclose()
    await settle()

    assert not world.engines["p"].has_request("r/prompt")
    assert world.sent("d") == []


async def test_another_engine_answers_if_the_chosen_one_is_lost() -> None:
    """While the prompt is computed, and after the answer began: one answer, and one end."""
    world = World()
    stream = world.submit()
    world.begin("p", "r/prompt", cached=1_024)
    world.engines["d"].mark_lost("killed")
    world.end("p", "r/prompt")
    await settle()
    peer = world.engines["d2"].sent[0].peer
    world.begin("d2", "r", cached=7_984, fetched=7_984)
    world.say("d2", Tokens("r", 0, (SampledToken(7),)))
    world.engines["d2"].mark_lost("killed")
    await settle()
    moved = world.engines["p"].sent[-1]
    world.begin("p", "r", cached=7_999)
    usage = Usage(len(PROMPT), 7_999, 1, 2)
    world.say("p", Tokens("r", 0, (SampledToken(8),)), Finished("r", "done", usage))
    events, end = await whole(stream)

    assert peer is not None
    assert (moved.request_id, moved.resumed_tokens) == ("r", 1)
    assert (end.usage.cached_tokens, end.usage.output_tokens) == (1_024, 2)
    assert [token.token_id for e in events if isinstance(e, Tokens) for token in e.tokens] == [7, 8]
    assert stream.correction == (0, 1_024 - 7_999, 1)


async def test_an_engine_that_is_held_back_answers_nothing() -> None:
    """It has come back meanwhile, and has erasures to carry out first."""
    world = World()
    stream = world.submit()
    replica = next(one for one in world.replicas if one.name == "d")
    replica.hold_back("erases what it missed")
    world.begin("p", "r/prompt")
    world.end("p", "r/prompt")
    await settle()
    world.answer("d2", cached=7_984, fetched=7_984)
    await whole(stream)

    assert world.sent("d") == []


async def test_a_gateway_that_drains_lets_it_be_answered() -> None:
    """It takes no new requests, and this one is not new."""
    world = World()
    stream = world.submit()
    for replica in world.replicas:
        replica.is_draining = True
    world.begin("p", "r/prompt")
    world.end("p", "r/prompt")
    await settle()
    world.answer("d", cached=7_984, fetched=7_984)
    _, end = await whole(stream)

    assert end.ending == "done"


async def test_the_engine_of_the_prompt_answers_if_it_is_the_last() -> None:
    """It finds what it has computed for this very request: that is no hit either."""
    world = World()
    stream = world.submit()
    world.begin("p", "r/prompt", cached=512)
    for name in ("d", "d2"):
        world.engines[name].mark_lost("killed")
    world.end("p", "r/prompt")
    await settle()
    world.answer("p", cached=7_999)
    _, end = await whole(stream)

    assert end.usage.cached_tokens == 512
    assert stream.correction == (0, 512 - 7_999, 0)


async def test_without_any_engine_left_there_is_one_end() -> None:
    """It says that none is ready, as a request without a prompt apart is told."""
    world = World()
    stream = world.submit()
    for engine in world.engines.values():
        engine.mark_lost("killed")
    _, end = await whole(stream)

    assert (end.ending, end.code) == ("failed", "engine_unavailable")


async def test_a_gateway_that_closes_ends_what_waits() -> None:
    """Its client would wait for ever."""
    world = World()
    stream = world.submit()
    await world.replicas.close()
    _, end = await whole(stream)

    assert end.code == "engine_died"


async def test_what_did_not_come_over_is_counted_as_such() -> None:
    """An operator whose engines do not reach each other sees it."""
    world = World()
    stream = world.submit()
    world.begin("p", "r/prompt")
    world.end("p", "r/prompt")
    await settle()
    world.answer("d")
    await whole(stream)

    assert world.outcomes == {"not_fetched": 1}


async def test_nothing_is_parted_where_it_may_not_be() -> None:
    """Off; several samples; no cache to leave it in; a namespace in which something was erased."""
    off, world = World(is_on=False), World()
    off.submit()
    several = replace(CLIENTS, request_id="s", samples=2)
    unread = replace(CLIENTS, request_id="u", grant=CacheGrant(b"n", write=False))
    for one in (several, unread):
        world.submit(one)
    world.replicas.apart.note_erasure(b"n")
    world.submit()
    before = world.sent("p")
    world.clock.advance(prompts_apart.ERASED_S)
    world.submit(replace(CLIENTS, request_id="later"))

    assert off.sent("p") == before == []
    assert world.sent("p") == ["later/prompt"]
