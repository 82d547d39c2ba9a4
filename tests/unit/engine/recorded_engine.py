"""A checked engine that records its plans, for tests of the schedule."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.api import CacheGrant, Quota
from engine.config import EngineConfig
from engine.plan import StepPlan
from tests.checkers import World
from tests.unit.engine.tiny_engines import ask


class RecordedWorld(World):
    """A world that records its plans by request id."""

    def __init__(
        self, *, blocks: int = 64, depth: int = 1, windows: tuple[int, ...] = (), **config: Any
    ) -> None:
        settings: dict[str, Any] = {
            "step_tokens_max": 16,
            "prefill_chunk_tokens_max": 8,
            "sequences_max": 8,
        }
        super().__init__(
            EngineConfig(**(settings | config)),
            blocks=blocks,
            block_size=4,
            depth=depth,
            context_tokens=1000,
            promises=False,
            windows=windows,
        )
        self.plans: list[StepPlan] = []
        self.rows: list[dict[str, int]] = []
        launch = self.runner.launch

        def watch(plan: StepPlan) -> None:
            self.plans.append(plan)
            row: Counter[str] = Counter()
            for part in plan.rows:
                sequence = self.core.requests.sequence(part.sequence_id)
                assert sequence is not None, "a step has rows of those who are here"
                row[sequence.parent.request.request_id] += part.count
            self.rows.append(dict(row))
            launch(plan)

        self.runner.launch = watch  # type: ignore[method-assign]

    def ask(self, name: str, tokens: tuple[int, ...], **wanted: Any) -> None:
        """Submit a request of namespace `namespace` (b"n")."""
        namespace = wanted.pop("namespace", b"n")
        quota = wanted.pop("quota", Quota())
        self.submit(ask(name, tokens, **({"grant": CacheGrant(namespace, quota)} | wanted)))

    def step_on(self, steps: int) -> None:
        """Run so many steps."""
        for _ in range(steps):
            self.step()

    def first_step_of(self, name: str) -> int:
        """Return the index of the first step with a row of the request."""
        return next(index for index, row in enumerate(self.rows) if name in row)

    def cached(self, name: str) -> int:
        """Return the request's cached prompt tokens."""
        return self.final(name).usage.cached_tokens

    def preemptions(self, name: str) -> int:
        """Return how often the request was preempted."""
        return self.final(name).usage.preemptions


def tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    """Return a prompt over two tokens whose first block differs between seeds."""
    return tuple((seed >> k) & 1 for k in range(4)) + tuple(k * k % 7 % 2 for k in range(count - 4))
