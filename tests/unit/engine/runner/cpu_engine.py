"""A core over a CPU runner that records the output of each request."""

from __future__ import annotations

from collections.abc import Sequence

from engine.api import Event, Finished, SampledToken, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.core import Core
from engine.model_store import ModelCard
from engine.models.cpu_decoder import Kernels
from engine.runner.cpu_runner import CpuRunner
from tests.fakes import FakeClock

BLOCK = 16


class CpuEngine:
    """A core and its output. `is_recounted`: the cache is recounted after each step. `run_up`: in
    place of the model's own.

    `output`: tokens by request and sample. `endings`: each request's ending and code, in order.
    `cached`, `accepted`: cached tokens, and accepted drafts, by request.
    """

    def __init__(
        self,
        card: ModelCard,
        config: EngineConfig,
        blocks: int,
        kernels: Kernels | None = None,
        *,
        is_recounted: bool = True,
        run_up: int | None = None,
    ) -> None:
        self._is_recounted = is_recounted
        context = card.config.context
        self.runner = CpuRunner(card, config, blocks=blocks, context=context, kernels=kernels)
        windows = self.runner.kv.format.windows
        self.cache = PrefixCache(
            blocks=blocks,
            block_size=BLOCK,
            windows=windows,
            state_blocks=self.runner.state_blocks,
        )
        self.core = Core(
            self.cache,
            self.runner,
            config,
            FakeClock(),
            vocab_size=card.config.vocab,
            context_tokens=context,
            run_up=card.config.run_up if run_up is None else run_up,
        )
        self.output: dict[tuple[str, int], list[SampledToken]] = {}
        self.endings: list[str] = []
        self.cached: dict[str, int] = {}
        self.accepted: dict[str, int] = {}

    def step(self) -> None:
        """Run a step."""
        self._record(self.core.step())
        if self._is_recounted:
            self.cache.check()

    def settle(self) -> None:
        """Run until nothing is left to do."""
        while self.core.has_work():
            self.step()

    def _record(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                key = (event.request_id, event.index)
                self.output.setdefault(key, []).extend(event.tokens)
            if isinstance(event, Finished):
                self.endings.append(event.ending + event.code)
                self.cached[event.request_id] = event.usage.cached_tokens
                accepted = sum(draft.accepted for draft in event.usage.drafts)
                self.accepted[event.request_id] = accepted
