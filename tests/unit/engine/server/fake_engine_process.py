"""An engine process over the fake runner.

Run as `python -m tests.unit.engine.server.fake_engine_process`.

The same program as `python -m engine.server.server`, with another core. A model folder's name
selects a fault: `hang` never ends its first step after the smoke test, `missing` is a missing
model, `deadly` kills the process in the step that begins a prompt with token 13, `broken` raises
in a step that computes token 13, `compiling` never compiles a grammar, `grammars` compiles those
over the characters from "@" on, `loading` never ends its start, `wide` has larger blocks.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from engine.api import Clock, EngineInfo
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.errors import ModelError
from engine.plan import StepPlan
from engine.processes import log_line
from engine.server.server import serve_process
from tests.fakes import FakeRunner
from tests.grammars import PolledGrammars, characters

VOCAB = 64
CONTEXT_TOKENS = 100_000
BLOCKS = 512


class FaultyRunner(FakeRunner):
    """The fake runner, with a fault that a real one may have."""

    def __init__(self, fault: str) -> None:
        super().__init__(BLOCKS, 16, vocab_size=VOCAB)
        self.fault = fault

    def launch(self, plan: StepPlan) -> None:
        """Hang or die as selected, else compute."""
        if self.fault == "hang" and plan.step > 1:
            threading.Event().wait()
        prompts = [row.token_ids or () for row in plan.rows if row.start == 0]
        if self.fault == "deadly" and any(13 in prompt for prompt in prompts):
            os._exit(9)
        if self.fault == "broken" and any(13 in (row.token_ids or ()) for row in plan.rows):
            raise ValueError("a list of 13 units has no room for 14")
        super().launch(plan)


def fake_core(
    config: EngineConfig, fault: str = "", clock: Clock = time.monotonic
) -> tuple[Core, EngineInfo]:
    """Return a core over the fake runner, and its EngineInfo."""
    if fault == "missing":
        raise ModelError("not_found", "There is no such model here.")
    if fault == "loading":
        log_line("loading")
        threading.Event().wait()
    core = Core(
        PrefixCache(blocks=BLOCKS, block_size=16),
        FaultyRunner(fault),
        config,
        clock,
        vocab_size=VOCAB,
        context_tokens=CONTEXT_TOKENS,
        constraints=_constraints(fault),
    )
    info = EngineInfo(
        epoch=os.urandom(8).hex(),
        model="fake",
        model_digest="fake-wide" if fault == "wide" else "fake",
        model_dir="fake",
        vocab_size=VOCAB,
        context_tokens=CONTEXT_TOKENS,
        block_size=16,
        blocks=BLOCKS,
        floor_blocks_max=core.cache.floor_blocks_max,
        kv_bytes_per_block=1,
        kv_format="words",
        device="cpu",
        pid=os.getpid(),
        promisable_blocks=core.cache.promisable_blocks,
    )
    return core, info


def _constraints(fault: str) -> Constraints | None:
    if fault == "compiling":
        return Constraints(PolledGrammars(polls=10**9))
    if fault == "grammars":
        return Constraints(PolledGrammars(vocabulary=characters(VOCAB)))
    return None


if __name__ == "__main__":
    serve_process(lambda s: fake_core(s.config, Path(s.model_dir).name))
