"""Levels below a model with window groups, under hypothesis: the machine of `test_levels_machine`
with windows of three and five tokens over blocks of two to four.

The token oracle finds a query that reads a hole, or a block that a load filled with another prefix,
in any group.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.api import CacheGrant, LeaseRequest, Request, Retention, Sampling
from tests.fake_levels import whole_of
from tests.property.machine_runs import case
from tests.property.test_levels_machine import KeptMachine, LevelsMachine
from tests.strategies import NAMESPACES, tokens

WINDOWS = (3, 5)
KEPT = Retention("kept", promise_s=3600)


class WindowLevelsMachine(LevelsMachine):
    """Copies of runs with the blocks of three KV groups, in host memory and on disk."""

    windows = WINDOWS
    formats = whole_of(1 + len(WINDOWS))
    slots = 30

    def run_one(self, prompt: tuple[int, ...], ends: tuple[int, ...] = ()) -> None:
        """Run a request of the first namespace, with leases that end there."""
        leases = tuple(LeaseRequest(end, KEPT, f"{self.count}/{end}") for end in ends)
        grant = CacheGrant(NAMESPACES[0], leases=leases)
        self.submit(Request("", prompt, 1, grant, Sampling(temperature=0)))
        self.world.settle()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=6, max_size=14).map(tuple),
        more=tokens,
        first=st.integers(0, 12),
        ends=st.lists(st.integers(4, 14), max_size=2).map(tuple),
        fails=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def come_back(
        self,
        prompt: tuple[int, ...],
        more: tuple[int, ...],
        first: int,
        ends: tuple[int, ...],
        fails: float,
    ) -> None:
        """Run a prompt, begin the next engine, and run its beginning and then all of it, from
        levels that serve or do not."""
        self.weather.fails = 0.0
        self.world.settle()
        self.run_one(prompt, ends)
        self.restart()
        if first:
            self.run_one(prompt[:first])
        self.weather.fails = fails
        self.run_one((*prompt, *more)[:16])
        self.weather.fails = 0.0
        self.run_one((*prompt, *more)[:16])


class WindowHostMachine(WindowLevelsMachine):
    """The same without a disk."""

    has_disk = False


class KeptWindowMachine(KeptMachine):
    """The same with host memory that outlives the engine, which may be killed at any step."""

    windows = WINDOWS
    formats = whole_of(1 + len(WINDOWS))
    slots = 30


TestWindowLevelsMachine = case(WindowLevelsMachine)
TestWindowHostMachine = case(WindowHostMachine)
TestKeptWindowMachine = case(KeptWindowMachine)
