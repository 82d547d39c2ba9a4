"""The whole core under hypothesis: any order of commands and steps, checked after each.

`tests.checkers.World` checks; hypothesis shrinks to the shortest list of commands that breaks a
rule.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from msgspec.structs import replace

from engine.api import Erase, Quota, Request
from engine.config import EngineConfig
from tests.checkers import MakeLevels, World
from tests.grammars import PolledGrammars
from tests.property.machine_runs import case
from tests.strategies import namespaces, quotas, requests, tokens

QUOTAS = {
    b"north": Quota(floor_blocks=2),
    b"south": Quota(ceiling_blocks=6, weight=2.0),
    b"east": Quota(),
}


def widen(quota: Quota, groups: int) -> Quota:
    """Return a quota for runs of `groups` blocks."""
    ceiling = None if quota.ceiling_blocks is None else quota.ceiling_blocks * groups
    return replace(quota, floor_blocks=quota.floor_blocks * groups, ceiling_blocks=ceiling)


class EngineMachine(RuleBasedStateMachine):
    """Commands and steps in any order."""

    windows: tuple[int, ...] = ()

    @initialize(
        depth=st.integers(1, 2),
        block_size=st.sampled_from([2, 4]),
        blocks=st.integers(8, 16),
        step_tokens=st.sampled_from([3, 8, 32]),
        chunk=st.sampled_from([2, 5, 16]),
        sequences=st.sampled_from([3, 6]),
        polls=st.integers(0, 4),
        draft_right=st.sampled_from([None, 0.0, 0.7, 1.0]),
    )
    def start(
        self,
        depth: int,
        block_size: int,
        blocks: int,
        step_tokens: int,
        chunk: int,
        sequences: int,
        polls: int,
        draft_right: float | None,
    ) -> None:
        config = EngineConfig(
            step_tokens_max=step_tokens,
            prefill_chunk_tokens_max=chunk,
            sequences_max=sequences,
            queue_requests_max=6,
            preemptions_max=1,
            attention_policies=("window",),
        )
        self.world = self.make_world(
            config,
            blocks=blocks * (1 + len(self.windows)),
            block_size=block_size,
            depth=depth,
            windows=self.windows,
            grammars=PolledGrammars(polls),
            make_levels=self.levels_below(),
            draft_right=draft_right,
        )
        groups = 1 + len(self.windows)
        self.quotas = {name: widen(quota, groups) for name, quota in QUOTAS.items()}
        self.count = 0

    def make_world(self, *args: Any, **settings: Any) -> World:
        """Return the engine."""
        return World(*args, **settings)

    def levels_below(self) -> MakeLevels | None:
        """Return what lies below the device: nothing."""
        return None

    @rule(request=requests(QUOTAS))
    def ask(self, request: Request) -> None:
        self.submit(request)

    def submit(self, request: Request) -> None:
        self.count += 1
        grant = replace(request.grant, quota=self.quotas[request.grant.namespace])
        self.world.submit(replace(request, request_id=f"r{self.count}", grant=grant))

    @rule(
        request=requests(QUOTAS),
        more=st.lists(tokens, min_size=2, max_size=5),
        output=st.integers(4, 8),
    )
    def submit_alike(self, request: Request, more: list[tuple[int, ...]], output: int) -> None:
        """Submit several requests with one prefix at once: they wait for each other, and
        for room.
        """
        long = replace(request, max_tokens=output, stop_token_ids=(), grammar=None, priority=0)
        for own in more:
            self.submit(replace(long, tokens=(*request.tokens, *own)[:16]))
        self.world.step()

    @precondition(lambda self: self.world.live)
    @rule(request=requests(QUOTAS))
    def hurry(self, request: Request) -> None:
        """Submit a request whose priority is above all running ones."""
        self.submit(replace(request, priority=2, deadline_s=None))
        self.world.step()

    @rule(steps=st.integers(4, 12))
    def step_on(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()

    @rule(namespace=namespaces, quota=quotas)
    def change_quota(self, namespace: bytes, quota: Quota) -> None:
        """Change a tenant's quota; some of its live requests no longer fit."""
        quota = widen(quota, 1 + len(self.windows))
        self.quotas[namespace] = quota
        self.world.cache.set_quota(replace(quota, payer=namespace))

    @rule(steps=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def step(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.world.clock.advance(seconds)
            self.world.step()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """Cancel a request, preferably a follower of another, which is rare."""
        held = self.world.core.scheduler.prefix_sharing.waiting.values()
        names = [twin.parent.request.request_id for twin in held] or sorted(self.world.live)
        self.world.cancel(data.draw(st.sampled_from(names)))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), index=st.integers(0, 2), charged=st.integers(0, 4))
    def end_sample(self, data: st.DataObject, index: int, charged: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.live)))
        self.world.end_sample(name, index, charged)

    @rule(namespace=namespaces, prompt=tokens)
    def peek(self, namespace: bytes, prompt: tuple[int, ...]) -> None:
        self.world.peek(namespace, prompt)

    @rule(
        namespace=namespaces,
        prompt=tokens,
        what=st.sampled_from(["all", "a lease", "a prefix"]),
        lease_id=st.sampled_from(["a", "b"]),
    )
    def erase(self, namespace: bytes, prompt: tuple[int, ...], what: str, lease_id: str) -> None:
        if what == "all":
            self.world.erase(namespace)
        elif what == "a lease":
            self.world.core.erase(Erase(1, namespace, lease_id))
        else:
            self.world.core.erase(Erase(1, namespace, tokens=prompt[:5]))

    @precondition(lambda self: self.count > 16 and not self.world.core.is_draining)
    @rule(seconds=st.sampled_from([0.0, 2.0, 1000.0]))
    def drain(self, seconds: float) -> None:
        """Stop accepting requests."""
        self.world.core.drain(seconds)

    @rule(seconds=st.sampled_from([6.0, 25.0, 4000.0]))
    def jump(self, seconds: float) -> None:
        self.world.clock.advance(seconds)

    @rule(at=st.integers(1, 4), how=st.sampled_from(["launch", "collect", "nan"]))
    def break_a_step(self, at: int, how: str) -> None:
        runner = self.world.runner
        step = self.world.core.stats().step + at
        {
            "launch": runner.fail_launch,
            "collect": runner.fail_collect,
            "nan": runner.nan_steps,
        }[how].add(step)

    @precondition(lambda self: self.count > 8)
    @rule()
    def cancel_everything(self) -> None:
        """Cancel all requests, as when every client disconnects: no block may stay pinned."""
        for name in sorted(self.world.live):
            self.world.cancel(name)
        self.world.settle()

    def teardown(self) -> None:
        """Check that the engine comes to rest with no block pinned."""
        if hasattr(self, "world"):
            self.world.settle()


class WindowEngineMachine(EngineMachine):
    """The same with three KV groups: group 0, and windows of three and five tokens."""

    windows = (3, 5)


TestEngineMachine = case(EngineMachine, 60)
TestWindowEngineMachine = case(WindowEngineMachine, 60)
