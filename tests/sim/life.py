"""One simulated life of an engine; every event is drawn from one seed.

Small pools, two-token prompts and few namespaces make sharing, copying, evicting, preempting and
expiring all happen within a few hundred events. `live` raises on the first error.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec.structs import replace

from engine.api import (
    CacheGrant,
    Fidelity,
    Grammar,
    LeaseRequest,
    Quota,
    Request,
    Retention,
    Sampling,
)
from engine.cache import PrefixCache
from engine.config import EngineConfig, LevelsConfig
from engine.core.core import Core
from engine.levels.levels import Levels
from tests.checkers import MakeLevels, World
from tests.fake_levels import PACKED, PLAIN, FakeStorage, FakeTransferEngine, Weather
from tests.fakes import FakeRunner
from tests.grammars import PolledGrammars

RETENTIONS = (
    Retention("five", promise_s=5, limit_s=10),
    Retention("hour", promise_s=0, limit_s=30, clock="request_start"),
    Retention("fixed", limit_s=20, clock="absolute", renewed_on_read=False, pinned=True),
    Retention("kept", promise_s=15),
)
NAMESPACES = (b"north", b"south", b"east")
STOP = 2
GRAMMARS = (
    Grammar("regex", "[ab]*"),
    Grammar("regex", "(ab)+"),
    Grammar("regex", "b[ab]{2}|aa*b"),
    Grammar("lark", 'start: "a" start "b" | "a"'),
    Grammar("regex", "abc"),  # no token spells it: a dead end
    Grammar("regex", "(a"),
)


class Life:
    """A seed, the engine it draws, and the events of that engine."""

    def __init__(
        self,
        seed: int,
        make_cache: Callable[..., PrefixCache] = PrefixCache,
        make_core: Callable[..., Core] = Core,
    ) -> None:
        self.chance = chance = random.Random(seed)
        # A separate generator, so that the other draws of a seed stay as before grammars.
        self.grammar_chance = random.Random(~seed)
        floor = chance.choice([0, 2])
        self.leased = chance.random() < 0.6
        self.world = World(
            EngineConfig(
                step_tokens_max=chance.choice([4, 8, 32]),
                prefill_chunk_tokens_max=chance.choice([2, 5, 16]),
                sequences_max=chance.choice([2, 4, 8]),
                queue_requests_max=chance.choice([3, 8]),
                preemptions_max=chance.choice([1, 3]),
            ),
            blocks=chance.choice([8, 12, 16, 40]),
            block_size=chance.choice([2, 4]),
            depth=chance.choice([1, 2]),
            promises=self.leased or floor > 0,
            make_cache=make_cache,
            make_core=make_core,
            grammars=PolledGrammars(self.grammar_chance.choice([0, 0, 3])),
            make_levels=self._levels_below(seed),
            draft_right=random.Random(seed ^ 0xD4AF7).choice([None, 0.0, 0.5, 0.9, 1.0]),
        )
        self.quotas = {
            b"north": Quota(floor_blocks=floor),
            b"south": Quota(ceiling_blocks=chance.choice([None, 6]), weight=2.0),
            b"east": Quota(),
        }
        self._count = 0
        self._break_some_steps()

    def _levels_below(self, seed: int) -> MakeLevels | None:
        """Return what lies below the device: nothing."""
        return None

    def live(self, events: int) -> World:
        """Run `events` events, then run all live requests to their end."""
        for _ in range(events):
            self.world.clock.advance(self.chance.choice([0, 0, 0.1, 1, 3]))
            self._happen()
        self.world.settle()
        return self.world

    def _happen(self) -> None:
        chance, world = self.chance, self.world
        roll = chance.random()
        if roll < 0.30:
            world.submit(self._request())
        elif roll < 0.90:
            world.step()
        elif roll < 0.94:
            world.cancel(self._draw_live_id())
        elif roll < 0.96:
            world.end_sample(self._draw_live_id(), chance.randrange(3), chance.randrange(4))
        elif roll < 0.975:
            world.peek(chance.choice(NAMESPACES), self._prompt())
        elif roll < 0.985:
            world.erase(chance.choice(NAMESPACES))
        elif roll < 0.995:
            world.clock.advance(chance.choice([12, 40, 4000]))
        else:
            world.restart()
            self._break_some_steps()

    def _break_some_steps(self) -> None:
        runner = self.world.runner
        for broken in (runner.fail_launch, runner.fail_collect, runner.nan_steps):
            if self.chance.random() < 0.2:
                broken.add(self.chance.randrange(80))

    def _draw_live_id(self) -> str:
        names = sorted(self.world.live) or ["unknown"]
        return self.chance.choice(names)

    def _prompt(self) -> tuple[int, ...]:
        """Draw a prompt, often an earlier one with a little more, as in a conversation."""
        chance, streams = self.chance, self.world.streams
        if streams and chance.random() < 0.4:
            said = streams[chance.choice(list(streams)[-8:])]
            start = [*said.request.tokens, *said.outputs[0]][: chance.randrange(1, 16)]
        else:
            start = []
        more = chance.randrange(0 if start else 1, 6 if start else 14)
        return (*start, *(chance.randrange(2) for _ in range(more)))

    def _request(self) -> Request:
        chance = self.chance
        self._count += 1
        namespace, tokens = chance.choice(NAMESPACES), self._prompt()
        leases = tuple(
            LeaseRequest(chance.randrange(len(tokens) + 1), chance.choice(RETENTIONS), f"l{n}")
            for n in range(chance.choice([0, 0, 1, 2]) if self.leased else 0)
        )
        return Request(
            request_id=f"r{self._count}",
            tokens=tokens,
            max_tokens=chance.choice([0, 1, 3, 6]),
            grant=CacheGrant(
                namespace,
                self.quotas[namespace],
                leases,
                read=chance.random() < 0.9,
                write=chance.random() < 0.9,
            ),
            sampling=Sampling(
                temperature=chance.choice([0.0, 1.0]),
                seed=chance.randrange(5),
                logprobs=chance.choice([None, 0]),
            ),
            samples=chance.choice([1, 1, 1, 2, 3]),
            stop_token_ids=(STOP,) if chance.random() < 0.5 else (),
            min_tokens=chance.choice([0, 0, 2]),
            priority=chance.choice([0, 0, 1]),
            deadline_s=chance.choice([None, None, 5.0]),
            prompt_logprobs=chance.choice([None, None, None, 0]),
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        chance = self.grammar_chance
        return chance.choice(GRAMMARS) if chance.random() < 0.3 else None


FIDELITY: dict[bytes, Fidelity] = {b"north": "exact", b"south": "near", b"east": "rough"}


class LeveledLife(Life):
    """A life with host memory and a disk below the device, whose speed, room and faults change; in
    every second one copies are packed where their namespace allows it."""

    def _levels_below(self, seed: int) -> MakeLevels | None:
        chance = random.Random(seed ^ 0x5EED)
        self.weather_chance, self.weather = chance, Weather()
        self.disk: FakeStorage | None = None
        slots, has_disk = chance.choice([4, 12, 60]), chance.random() < 0.7
        formats = random.Random(seed ^ 0x9AC4ED).choice([(PLAIN,), PACKED])
        records_max, keeps = chance.choice([12, 40, 10**9]), chance.random() < 0.5
        config = LevelsConfig(
            host_mib=1,
            disk_gib=1.0,
            host_tokens_min=1,
            disk_tokens_min=1,
            host_keeps_promises=keeps,
        )

        def make(cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
            memory = FakeTransferEngine(
                runner, slots, chance, self.weather, formats, unpackable=0.05
            )
            before, self.disk = self.disk, None
            if has_disk:
                self.disk = FakeStorage(
                    memory, chance, self.weather, lambda: self.world.clock(), records_max
                )
                self.disk.take_over(before)
            levels = Levels(cache, config, memory, self.disk)
            levels.loads.part = 1
            return levels

        return make

    def _request(self) -> Request:
        """Draw a request that allows the copies that its namespace does."""
        request = super()._request()
        grant = replace(request.grant, fidelity=FIDELITY[request.grant.namespace])
        return replace(request, grant=grant)

    def _happen(self) -> None:
        chance = self.weather_chance
        if chance.random() < 0.02:
            self.weather.polls_max = chance.choice([0, 1, 6])
            self.weather.fails = chance.choice([0.0, 0.0, 0.1, 1.0])
            self.weather.seconds = chance.choice([0.0, 1e-6, 0.01])
        if self.disk is not None and chance.random() < 0.01:
            self.disk.is_away = chance.random() < 0.5
        if self.disk is not None and self.disk.records and chance.random() < 0.01:
            self.disk.lose(chance.choice(sorted(self.disk.records)))
        super()._happen()
