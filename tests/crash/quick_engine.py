"""An engine process over the fake runner that serves a prepared model, for tests of its death.

Run as `python -m tests.crash.quick_engine`. It starts without torch; a gateway takes it for an
engine of the model, since its digest is that of the model's files.
"""

from __future__ import annotations

import time
from pathlib import Path

from msgspec.structs import replace

from engine.api import EngineInfo
from engine.cache import PrefixCache
from engine.core.core import Core
from engine.model_store import load_card
from engine.server.links.keeper_link import ServerSettings
from engine.server.server import serve_process
from tests.fakes import FakeRunner
from tests.unit.engine.server.fake_engine_process import fake_core

BLOCKS, BLOCK = 2_048, 16


def quick_core(
    settings: ServerSettings, make_runner: type[FakeRunner] = FakeRunner
) -> tuple[Core, EngineInfo]:
    """Return a core over the fake runner, with the vocabulary and the digest of a model."""
    card = load_card(Path(settings.model_dir))
    vocab, context = card.config.vocab, card.config.context
    core = Core(
        PrefixCache(blocks=BLOCKS, block_size=BLOCK),
        make_runner(BLOCKS, BLOCK, vocab_size=vocab),
        settings.config,
        time.monotonic,
        vocab_size=vocab,
        context_tokens=context,
    )
    info = replace(
        fake_core(settings.config)[1],
        model=card.name,
        model_digest=f"{card.digest}-fake",
        model_dir=settings.model_dir,
        vocab_size=vocab,
        context_tokens=context,
        blocks=BLOCKS,
        floor_blocks_max=core.cache.floor_blocks_max,
        promisable_blocks=core.cache.promisable_blocks,
    )
    return core, info


if __name__ == "__main__":
    serve_process(quick_core)
