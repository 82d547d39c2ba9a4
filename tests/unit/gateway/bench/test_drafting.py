"""The workload of drafts: what it sends, and what it makes of the answers."""

from __future__ import annotations

import random
from typing import Any

import pytest
from aiohttp import web

from gateway.bench.drafting import CODE, DRAFTS_HEADER, KINDS, DraftSizes, measure_kind
from tests.unit.gateway.bench.scripted_endpoint import Endpoint, WatchedClock, client_of, values

SIZES = DraftSizes(each=4, text_words=60, output=8)


class DraftingEndpoint(Endpoint):
    """An endpoint whose drafts halve the pieces of text and the time."""

    def __init__(self, clock: WatchedClock) -> None:
        super().__init__(clock)
        self.words: list[str] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        word = request.headers.get(DRAFTS_HEADER, "")
        self.words.append(word)
        self.pauses_s = (0.05, *(0.01,) * (8 if word == "off" else 4))
        return await super().answer(request)


async def test_ratios_are_of_answers_in_turns() -> None:
    """Each prompt is computed first; then who goes first alternates."""
    clock = WatchedClock()
    endpoint = DraftingEndpoint(clock)
    async with client_of(endpoint.answer, clock) as client:
        figures = values(await measure_kind(client, "chat", random.Random(3), SIZES))

    assert endpoint.words == ["off", "off", "auto", "off", "auto", "off"] * 2
    assert figures["chat tok/s with drafts / without"] == pytest.approx(2.0)
    assert figures["chat steps without / with"] == pytest.approx(9 / 5)
    assert figures["chat same text"] == 0
    assert all("ignore_eos" in body and not body["ignore_eos"] for body in endpoint.bodies)


@pytest.mark.parametrize("name", KINDS)
async def test_every_kind_asks_for_an_answer(name: str) -> None:
    """A seed asks the same again; another one, in the end, something else."""
    asked = [KINDS[name](random.Random(seed), SIZES) for seed in (1, 1, *range(2, 12))]

    assert asked[0] == asked[1]
    assert len({task.question for task in asked}) > 1
    assert all(len(task.question) > 30 for task in asked)


def test_a_prediction_is_the_code_that_is_edited() -> None:
    """It is a part of the question, as in an editor."""
    task = KINDS["predicted edit"](random.Random(1), DraftSizes())
    prediction: dict[str, Any] = task.fields["prediction"]

    assert task.question.endswith(prediction["content"])
    assert any(code.startswith(prediction["content"]) for code in CODE)
