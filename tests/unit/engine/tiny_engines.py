"""Engines of a few blocks over the token oracle, and small requests to them."""

from __future__ import annotations

from typing import Any

from engine.api import CacheGrant, Finished, Request, Sampling
from engine.config import EngineConfig
from tests.checkers import World
from tests.grammars import PolledGrammars

CONFIG = EngineConfig(step_tokens_max=64, prefill_chunk_tokens_max=32, sequences_max=8)
GREEDY = Sampling(temperature=0)
PROMPT = (0, 1, 1, 0, 1, 0, 0, 1, 1)


def make_world(
    depth: int,
    *,
    blocks: int = 16,
    config: EngineConfig = CONFIG,
    polls: int = 0,
    draft_right: float | None = None,
    windows: tuple[int, ...] = (),
) -> World:
    """Return an engine whose grammars are ready after so many polls."""
    return World(
        config,
        blocks=blocks,
        block_size=4,
        depth=depth,
        context_tokens=48,
        grammars=PolledGrammars(polls),
        draft_right=draft_right,
        windows=windows,
    )


def ask(name: str = "r", tokens: tuple[int, ...] = PROMPT, **wanted: Any) -> Request:
    settings: dict[str, Any] = {
        "request_id": name,
        "tokens": tokens,
        "max_tokens": 4,
        "grant": CacheGrant(b"n"),
        "sampling": GREEDY,
    }
    return Request(**(settings | wanted))


def run(world: World, *requests: Request) -> list[Finished]:
    for request in requests:
        world.submit(request)
    world.settle()
    return [world.final(request.request_id) for request in requests]
