"""Engines of a few blocks over the token oracle, with a host level and a disk below."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.api import (
    CacheGrant,
    LeaseGrant,
    LeaseRequest,
    LevelWait,
    Peek,
    Quota,
    Request,
    Retention,
    Sampling,
    Started,
)
from engine.cache import Fact
from engine.cache.events import PromiseLost
from engine.config import EngineConfig, LevelsConfig
from engine.moves import SlotFormat
from tests.checkers import World
from tests.fake_levels import PLAIN, LevelsBelow

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


class LeveledWorld(LevelsBelow, World):
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
        draft_right: float | None = None,
        **settings: Any,
    ) -> None:
        """`is_kept`: host memory outlives the engine. `draft_right`: see `World`."""
        self.has_disk, self.is_kept, self.formats = disk, is_kept, formats
        wanted: dict[str, Any] = {
            "host_mib": 1,
            "disk_gib": 1.0 if disk else 0.0,
            "disk_tokens_min": 4,
            "host_tokens_min": 4,
        }
        self.prepare(LevelsConfig(**(wanted | settings)), slots, records_max)
        super().__init__(
            EngineConfig(step_tokens_max=64, sequences_max=8),
            blocks=blocks,
            block_size=4,
            context_tokens=48,
            depth=depth,
            windows=windows,
            make_levels=self.make_levels,
            draft_right=draft_right,
        )
        self.lost: list[PromiseLost] = []

    def now_s(self) -> float:
        """See `LevelsBelow`."""
        return self.clock()

    def restart(self) -> None:
        """See `World`; the facts of promises that are lost are kept."""
        super().restart()
        self.cache.facts = self._note

    def _note(self, fact: Fact) -> None:
        if isinstance(fact, PromiseLost):
            self.lost.append(fact)

    def run(self, *requests: Request) -> list[int]:
        """Run requests at once; return the cached tokens that each began with."""
        self.clock.advance(0.1)
        for request in requests:
            self.submit(request)
        self.settle()
        return [self.cached(request.request_id) for request in requests]

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and what it brings come to its end."""
        self.clock.advance(seconds)
        self.step()
        self.settle()

    def started(self, name: str) -> Started:
        """Return the first event of a request."""
        started = self.streams[name].started
        assert started is not None
        return started

    def cached(self, name: str) -> int:
        """Return the cached tokens that a request began with."""
        return self.started(name).cached_tokens

    def wait(self, name: str) -> LevelWait:
        """Return what levels cost a request; nothing where they had no part in it."""
        return self.started(name).wait or LevelWait()

    def loaded(self, name: str) -> dict[str, int]:
        """Return the tokens that were loaded for a request, by level."""
        return dict(self.started(name).loaded_tokens)

    def grant(self, name: str) -> LeaseGrant:
        """Return the grant of a request's one lease."""
        (grant,) = self.started(name).leases
        return grant

    def promised(self) -> tuple[int, int, int]:
        """Return the promised blocks of the namespace n: all, kept below, and gone from the
        device.
        """
        use = self.cache.use(b"n")
        return sum(use.promised.values()), use.below, use.away

    def below(self, tokens: tuple[int, ...]) -> tuple[int, dict[str, int]]:
        """Return the tokens of a prompt that the device has, and those that levels have more."""
        peeked = self.core.peek(Peek(1, b"n", tokens))
        return peeked.cached_tokens, dict(peeked.stored_tokens)

    def stored(self) -> set[tuple[int, ...]]:
        """Return the prefixes of twelve tokens in the namespace n that the disk has."""
        records = self.disk.records.items()
        paths = {self.disk.path(i) for i, record in records if record.namespace == b"n"}
        return {path for path in paths if len(path) == 12}

    def forget_promises(self) -> None:
        """Have the disk promise nothing any more, so that no engine is told of its records."""
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
