"""The whole brain under hypothesis: any order of commands and steps, refereed after each.

The referee is `tests.checkers.World`; what shrinks here is the shortest list of commands that
breaks a rule.
"""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.api import Quota, Request
from engine.config import EngineConfig
from tests.checkers import World
from tests.grammars import PatientGrammars
from tests.strategies import namespaces, requests, tokens

QUOTAS = {
    b"north": Quota(floor_blocks=2),
    b"south": Quota(ceiling_blocks=6, weight=2.0),
    b"east": Quota(),
}


class EngineMachine(RuleBasedStateMachine):
    """Commands and steps in any order."""

    @initialize(
        depth=st.integers(1, 2),
        block_size=st.sampled_from([2, 4]),
        blocks=st.integers(8, 24),
        step_tokens=st.sampled_from([3, 8, 32]),
        chunk=st.sampled_from([2, 5, 16]),
        sequences=st.sampled_from([3, 6]),
        polls=st.integers(0, 4),
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
    ) -> None:
        config = EngineConfig(
            step_tokens_max=step_tokens,
            prefill_chunk_tokens_max=chunk,
            sequences_max=sequences,
            queue_requests_max=6,
            preemptions_max=2,
        )
        self.world = World(
            config,
            blocks=blocks,
            block_size=block_size,
            depth=depth,
            grammars=PatientGrammars(polls),
        )
        self.count = 0

    @rule(request=requests(QUOTAS))
    def submit(self, request: Request) -> None:
        self.count += 1
        self.world.submit(msgspec.structs.replace(request, request_id=f"r{self.count}"))

    @rule(steps=st.integers(1, 6), seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def step(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.world.clock.advance(seconds)
            self.world.step()

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.live))))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), index=st.integers(0, 2), charged=st.integers(0, 4))
    def end_sample(self, data: st.DataObject, index: int, charged: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.live)))
        self.world.end_sample(name, index, charged)

    @rule(namespace=namespaces, prompt=tokens)
    def peek(self, namespace: bytes, prompt: tuple[int, ...]) -> None:
        self.world.peek(namespace, prompt)

    @rule(namespace=namespaces)
    def erase(self, namespace: bytes) -> None:
        self.world.erase(namespace)

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

    @rule()
    def cancel_everything(self) -> None:
        """As when every client leaves: nothing may stay pinned."""
        for name in sorted(self.world.live):
            self.world.cancel(name)
        self.world.settle()

    def teardown(self) -> None:
        """Whatever happened, the engine comes to rest with nothing held."""
        if hasattr(self, "world"):
            self.world.settle()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(stateful_step_count=60)
