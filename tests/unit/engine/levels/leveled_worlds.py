"""Engines of a few blocks over the token oracle, with a host level and a disk below."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from engine.api import (
    CacheGrant,
    LeaseRequest,
    LevelWait,
    Peek,
    Quota,
    Request,
    Retention,
    Sampling,
)
from engine.cache import Fact, PrefixCache
from engine.cache.events import PromiseLost
from engine.config import EngineConfig, LevelsConfig
from engine.levels.levels import Levels
from engine.moves import SlotFormat
from tests.checkers import World
from tests.fake_levels import PLAIN, FakeKeptSlots, FakeStorage, FakeTransferEngine, Weather
from tests.fakes import FakeRunner

PAYER = Quota(payer=b"payer")
HOUR = Retention("hour", promise_s=3600, limit_s=7200)
LIMITED = Retention("limited", limit_s=50, clock="absolute", renewed_on_read=False)


def prompt(number: int, count: int = 13) -> tuple[int, ...]:
    """Return the tokens of a prompt that shares its first two blocks with no other number."""
    chance = random.Random(number)
    digits = tuple(number >> bit & 1 for bit in range(8))
    return digits + tuple(chance.randrange(2) for _ in range(count - 8))


def ask(name: str, tokens: tuple[int, ...], **wanted: Any) -> Request:
    """Return a greedy request for two tokens in the namespace n."""
    settings: dict[str, Any] = {
        "request_id": name,
        "tokens": tokens,
        "max_tokens": 2,
        "grant": CacheGrant(b"n", PAYER),
        "sampling": Sampling(temperature=0),
    }
    return Request(**(settings | wanted))


def leased(
    tokens: int, retention: Retention = HOUR, lease_id: str = "lease", quota: Quota = PAYER
) -> CacheGrant:
    """Return a grant with one lease."""
    return CacheGrant(b"n", quota, leases=(LeaseRequest(tokens, retention, lease_id),))


class LeveledWorld(World):
    """A checked engine of 40 blocks of 4 with 120 host slots, and a disk that outlives it."""

    def __init__(
        self,
        *,
        slots: int = 120,
        disk: bool = True,
        blocks: int = 40,
        depth: int = 1,
        formats: Sequence[SlotFormat] = (PLAIN,),
        is_kept: bool = False,
        records_max: int = 10**9,
        windows: tuple[int, ...] = (),
        **settings: Any,
    ) -> None:
        """`is_kept`: host memory outlives the engine."""
        self.kept: FakeKeptSlots | None = None
        memories: list[FakeTransferEngine] = []
        self.weather, self.chance = Weather(), random.Random(1)
        self.formats = formats
        self.disk: FakeStorage | None = None
        wanted: dict[str, Any] = {
            "host_mib": 1,
            "disk_gib": 1.0 if disk else 0.0,
            "disk_tokens_min": 4,
        }
        wanted |= {"host_tokens_min": 4} | settings

        def below(cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
            last = memories[-1] if memories else None
            self.memory = FakeTransferEngine(runner, slots, self.chance, self.weather, self.formats)
            memories.append(self.memory)
            before, self.disk = self.disk, None
            if disk:
                self.disk = FakeStorage(
                    self.memory, self.chance, self.weather, self.clock, records_max
                )
                self.disk.take_over(before)
            more: dict[str, Any] = {}
            if is_kept:
                kept = self.kept = self.kept or FakeKeptSlots(self.memory.layout.slots, self.boot_s)
                kept.start(self.memory, last)
                more = {"wipe": kept.wipe, "kept": kept, "now_s": self.clock()}
            self.levels = Levels(cache, LevelsConfig(**wanted), self.memory, self.disk, **more)
            return self.levels

        super().__init__(
            EngineConfig(step_tokens_max=64, sequences_max=8),
            blocks=blocks,
            block_size=4,
            context_tokens=48,
            depth=depth,
            windows=windows,
            make_levels=below,
        )
        self.lost: list[PromiseLost] = []

    def restart(self) -> None:
        """See `World`; the facts of promises that are lost are kept."""
        super().restart()
        self.cache.facts = self._note

    def _note(self, fact: Fact) -> None:
        if isinstance(fact, PromiseLost):
            self.lost.append(fact)

    def boot_s(self) -> float:
        """Return the instant of the machine's boot clock."""
        return self.clock() + 5_000.0

    def run(self, *requests: Request) -> list[int]:
        """Run requests at once; return the cached tokens that each began with."""
        self.clock.advance(0.1)
        for request in requests:
            self.submit(request)
        self.settle()
        return [self.cached(request.request_id) for request in requests]

    def cached(self, name: str) -> int:
        """Return the cached tokens that a request began with."""
        started = self.streams[name].started
        assert started is not None
        return started.cached_tokens

    def wait(self, name: str) -> LevelWait:
        """Return what levels cost a request; nothing where they had no part in it."""
        started = self.streams[name].started
        assert started is not None
        return started.wait or LevelWait()

    def loaded(self, name: str) -> dict[str, int]:
        """Return the tokens that were loaded for a request, by level."""
        started = self.streams[name].started
        assert started is not None
        return dict(started.loaded_tokens)

    def below(self, tokens: tuple[int, ...]) -> tuple[int, dict[str, int]]:
        """Return the tokens of a prompt that the device has, and those that levels have more."""
        peeked = self.core.peek(Peek(1, b"n", tokens))
        return peeked.cached_tokens, dict(peeked.stored_tokens)

    def stored(self) -> set[tuple[int, ...]]:
        """Return the prefixes of twelve tokens in the namespace n that the disk has."""
        assert self.disk is not None
        records = self.disk.records.items()
        paths = {self.disk.path(i) for i, record in records if record.namespace == b"n"}
        return {path for path in paths if len(path) == 12}

    def forget_promises(self) -> None:
        """Have the disk promise nothing any more, so that no engine is told of its records."""
        assert self.disk is not None
        for record in self.disk.records.values():
            record.promise_at_s = 0.0

    def step_until_loading(self) -> None:
        """Step until a request waits for a level."""
        for _ in range(20):
            if self.core.stats().loading:
                return
            self.step()
        raise AssertionError("nothing is loaded")

    def push_out(self, count: int = 16) -> None:
        """Run other prompts in another namespace until the device has evicted all before."""
        for number in range(count):
            name = f"push{len(self.streams)}"
            self.run(ask(name, prompt(number + 100, 13), grant=CacheGrant(b"other", PAYER)))
