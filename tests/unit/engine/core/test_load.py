"""The load that an engine tells to those who route."""

from __future__ import annotations

from engine.api import CacheGrant, Request, Sampling
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.statistics import LoadReport
from tests.fakes import FakeClock, FakeRunner

BLOCKS, VOCAB = 40, 100


def make_core() -> Core:
    """A core whose steps have eight tokens."""
    return Core(
        PrefixCache(blocks=BLOCKS, block_size=4),
        FakeRunner(BLOCKS, 4, vocab_size=VOCAB),
        EngineConfig(step_tokens_max=8),
        FakeClock(),
        vocab_size=VOCAB,
        context_tokens=120,
    )


def load_of(core: Core) -> LoadReport:
    return core.engine_stats.load(core.cache, core.scheduler, core.requests, 0)


def submit(core: Core, name: str, tokens: range, expected_cached: int = 0) -> None:
    core.submit(
        Request(
            name, tuple(tokens), 1, CacheGrant(b"n"), Sampling(temperature=0),
            expected_cached_tokens=expected_cached,
        )
    )  # fmt: skip


def test_what_is_left_of_a_begun_prompt_waits_too() -> None:
    """A request that comes now waits for it: without it a replica in the middle of a long prompt
    looked idle, and the median first token of a simulated fleet was half as long again."""
    core = make_core()
    submit(core, "long", range(40))
    submit(core, "next", range(50, 60))

    left = []
    while core.has_work():
        core.step()
        left.append(load_of(core).waiting_tokens)

    assert left[:4] == [32 + 10, 24 + 10, 16 + 10, 8 + 10]
    assert left[-1] == 0


def test_what_a_waiting_prompt_is_expected_to_find_does_not_wait() -> None:
    """Turns of long conversations would make a queue look ten times as long as it is. Once it has
    begun, what it found counts."""
    core = make_core()
    submit(core, "long", range(40))
    submit(core, "turn", range(50, 90), expected_cached=36)
    submit(core, "known whole", range(10), expected_cached=40)

    left = []
    while core.has_work():
        core.step()
        left.append(load_of(core).waiting_tokens)
        core.requests.check()

    assert left[:4] == [32 + 4 + 1, 24 + 4 + 1, 16 + 4 + 1, 8 + 4 + 1]
    assert max(left[4:]) > 4 + 1, "36 of them were not there"
    assert left[-1] == 0


def test_cached_blocks_are_not_free() -> None:
    """A prompt that takes them displaces what may be asked for again."""
    core = make_core()
    submit(core, "a", range(40))
    while core.has_work():
        core.step()

    assert load_of(core).free_blocks == BLOCKS - 10
