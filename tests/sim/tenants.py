"""A quiet tenant beside many that ask again as soon as they are answered, on a synthetic machine.

The clock advances by what each step's tokens cost, so a wait is a number that no other process
changes.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from engine.api import Quota
from tests.unit.engine.timed_engine import Machine, TimedWorld

QUIET_TOKENS, QUIET_MISSING = 100, 2
PAUSE_S = 0.02
STEPS_MAX = 20_000


class Observed(NamedTuple):
    """`waits`: the quiet tenant's first-token times, in units of the mean step. `busy_rate`:
    tokens that the busy tenants were served in a second.
    """

    waits: list[float]
    busy_rate: float


class Tenants:
    """Busy tenants, each with `each` requests of `prompt` and `answer` tokens at a time."""

    def __init__(
        self,
        machine: Machine,
        tenants: int,
        *,
        each: int = 2,
        samples: int = 1,
        prompt: int = 300,
        answer: int = 32,
        **config: Any,
    ) -> None:
        self.world = TimedWorld(machine, blocks=20_000, **config)
        self._chance = random.Random(1)
        self._prompt, self._answer, self._samples = prompt, answer, samples
        self._asked = self._ended = 0
        self._said = self._draw(QUIET_TOKENS - QUIET_MISSING)
        for tenant in range(tenants):
            for _ in range(each):
                self._ask(tenant)

    def observe(self, requests: int) -> Observed:
        """Send the quiet tenant's requests one after another, each after a pause."""
        world, waits = self.world, list[float]()
        self._ask_quietly("quiet")
        while "quiet" in world.live:  # its prefix is cached from here on
            self._step()
        begun_s, ended, steps = world.clock(), self._ended, len(world.took)
        for number in range(requests):
            due_s = world.clock() + PAUSE_S * self._chance.uniform(0.5, 1.5)
            while world.clock() < due_s:
                self._step()
            name = f"quiet{number}"
            self._ask_quietly(name)
            while name in world.live:
                self._step()
            waits.append(world.first_token_s(name))
        took = world.took[steps:]
        tokens = self._prompt + self._samples * self._answer
        rate = (self._ended - ended) * tokens / (world.clock() - begun_s)
        mean_s = sum(took) / len(took)
        return Observed([wait / mean_s for wait in waits], rate)

    def run_alone(self, answers: int) -> float:
        """Return the tokens that the busy tenants are served in a second without the quiet one."""
        begun_s, ended = self.world.clock(), self._ended
        while self._ended < ended + answers:
            self._step()
        tokens = self._prompt + self._samples * self._answer
        return (self._ended - ended) * tokens / (self.world.clock() - begun_s)

    # -- internals ----------------------------------------------------------------------------

    def _step(self) -> None:
        assert len(self.world.took) < STEPS_MAX, "the requests do not come to an end"
        before = set(self.world.live)
        self.world.step()
        for name in sorted(before - set(self.world.live)):
            if name.startswith("busy"):
                self._ended += 1
                self._ask(int(name.partition("-")[2]))

    def _ask(self, tenant: int) -> None:
        self._asked += 1
        self.world.ask(
            f"busy{self._asked}-{tenant}",
            self._draw(self._prompt),
            max_tokens=self._answer,
            namespace=b"busy%d" % tenant,
            samples=self._samples,
        )

    def _ask_quietly(self, name: str) -> None:
        tokens = (*self._said, *self._draw(QUIET_MISSING))
        quota = Quota(floor_blocks=300)
        self.world.ask(name, tokens, max_tokens=2, namespace=b"quiet", quota=quota)

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._chance.randrange(2) for _ in range(count))
