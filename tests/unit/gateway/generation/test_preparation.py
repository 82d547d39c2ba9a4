"""Prompts are tokenized on the event loop or in a thread, by size."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from gateway.dialects.canonical import Prompt, Rendered
from gateway.generation import preparation
from gateway.prompt import Renderer
from gateway.prompt.token_budget import TokenBudget
from tests.unit.gateway.gateway_fixture import GatewayFixture

LONG = "word " * (preparation.INLINE_CHARS_MAX // 4)
VERY_LONG = "word " * (preparation.CACHED_CHARS_MAX // 4)
TOOL = {"name": "f", "input_schema": {"type": "object", "properties": {}}}


class WatchedRenderer(Renderer):
    """A renderer that records whether it runs on the event loop's thread."""

    def render(self, prompt: Prompt, owner: int = 0, budget: TokenBudget | None = None) -> Rendered:
        """Render like a renderer."""
        self.seen.append(threading.get_ident() == self.loop_thread)
        return super().render(prompt, owner, budget)

    loop_thread: int
    seen: list[bool]


@pytest.fixture
def watched(unopened_gateway: GatewayFixture) -> GatewayFixture:
    """A gateway with a watched renderer, not opened yet."""
    unopened_gateway.renderer = renderer = WatchedRenderer(unopened_gateway.card)
    renderer.loop_thread, renderer.seen = threading.get_ident(), []
    unopened_gateway.context_tokens = preparation.CACHED_CHARS_MAX
    return unopened_gateway


@pytest.mark.parametrize(
    ("texts", "more", "expected"),
    [
        (["short", "short"], {}, [True, True]),
        ([LONG, LONG], {}, [False, True]),
        ([LONG, LONG + "x"], {}, [False, False]),
        ([LONG, LONG], {"tools": [TOOL]}, [False, False]),
        ([VERY_LONG, VERY_LONG], {}, [False, False]),
    ],
    ids=["short", "the same again", "another", "with tools", "the same, too long"],
)
async def test_short_or_cached_prompts_stay_on_the_loop(
    watched: GatewayFixture, texts: list[str], more: dict[str, Any], expected: list[bool]
) -> None:
    """Tokenizing a long text would block other requests; cached text is faster than a thread."""
    await watched.open()
    try:
        for text in texts:
            messages = [{"role": "user", "content": text}]
            body = {"model": watched.model, "messages": messages, **more}
            status, answer, _ = await watched.ask("/v1/messages/count_tokens", body)
            assert status == 200, answer
    finally:
        await watched.close()

    assert isinstance(watched.renderer, WatchedRenderer)
    assert watched.renderer.seen == expected
