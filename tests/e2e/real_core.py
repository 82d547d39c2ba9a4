"""The default model on this disk, and a core over it, for tests that need them.

`make pull` fetches the model; `make test` runs that first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine.api import Finished, Request, SampleEnded, Tokens
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.core.constraints import Constraints
from engine.core.core import Core
from engine.errors import ModelError
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.grammar import MaskFiller
from engine.grammar.sandbox import SandboxSettings
from engine.model_store import DEFAULT_MODEL, ModelCard, prepare, resolve
from engine.models.cpu_decoder import load_kernels
from engine.runner.cpu_runner import CpuRunner

BLOCKS, CONTEXT = 200, 1024


def real_card(name: str = DEFAULT_MODEL) -> ModelCard:
    """Return a model; skips the test if it was not fetched."""
    models = Path(os.environ.get("TRUNKLINE_DATA_DIR", "data")) / "models"
    try:
        return prepare(name, resolve(name, models), models)
    except ModelError as error:
        pytest.skip(error.message)


@contextmanager
def real_core(card: ModelCard) -> Iterator[Core]:
    """Yield a core with the grammar compiler's threads and processes, which end with it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = EngineConfig()
    kernels = load_kernels(card.config, 2)
    runner = CpuRunner(card, config, blocks=BLOCKS, context=CONTEXT, kernels=kernels)
    settings = SandboxSettings(str(card.tokenizer_path), card.config.vocab, card.stop_token_ids)
    core = Core(
        PrefixCache(blocks=BLOCKS, block_size=config.block_size),
        runner,
        config,
        time.monotonic,
        vocab_size=card.config.vocab,
        context_tokens=CONTEXT,
        constraints=Constraints(GrammarCompiler(settings, time.monotonic), MaskFiller(2)),
    )
    yield core
    core.constraints.close()
    if kernels is not None:
        kernels.close()
    torch.set_num_threads(before)


def exact_runner(card: ModelCard, by: str, blocks: int, context: int) -> CpuRunner:
    """Return a runner in fp32, `by` "torch" or "C"; skips the test where C has no compiler."""
    config = EngineConfig(dtype="fp32", kv_dtype="fp32")
    kernels = load_kernels(card.config, 2) if by == "C" else None
    if by == "C" and kernels is None:
        pytest.skip("no C compiler here")
    return CpuRunner(card, config, blocks=blocks, context=context, kernels=kernels)


def run_samples(core: Core, request: Request) -> tuple[list[list[int]], list[str]]:
    """Run one request to its end; return each sample's token ids and finish reason."""
    core.submit(request)
    drawn: list[list[int]] = [[] for _ in range(request.samples)]
    reasons = [""] * request.samples
    while core.has_work():
        for event in core.step():
            if isinstance(event, Tokens):
                drawn[event.index] += [token.token_id for token in event.tokens]
            if isinstance(event, SampleEnded):
                reasons[event.index] = event.reason
            if isinstance(event, Finished):
                assert event.ending == "done", event
    return drawn, reasons
